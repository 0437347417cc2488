"""The demo model: its text generator, tokenizer, training, export and measurement.

Knows nothing of the product's folders; it reads and writes a Hugging Face Llama directory.
"""
