"""Ollama's API: an adapter onto the plans and generations of chats and completions."""
