"""Build the demo model: text generator, tokenizer, training, export and evaluation.

Independent of the product's folders. Reads and writes a Hugging Face Llama directory.
"""
