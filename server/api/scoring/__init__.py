"""Rankings and scores of texts, by the cosine of their vectors."""
