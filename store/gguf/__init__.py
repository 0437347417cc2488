"""Model files in GGUF form: the container, and the model directory that a file's metadata means."""
