"""OpenAI's API: chats, completions, responses, embeddings, models; also reranking and scores."""
