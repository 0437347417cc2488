"""Ollama's API, mapped onto chats, completions and embeddings."""
