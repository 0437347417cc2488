"""GGUF model files: read the container, and write an equivalent model directory."""
