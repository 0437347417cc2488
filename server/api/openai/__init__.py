"""OpenAI's API and what belongs to it: chat, responses, vectors, scores, files, batches."""
