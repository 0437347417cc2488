"""What the parts of the server agree upon: one generation, one embedding, one charge."""
