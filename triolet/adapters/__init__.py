"""LoRA adapters: their files, and what names them."""
