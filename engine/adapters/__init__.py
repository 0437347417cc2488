"""LoRA adapters: their matrices, and the rows of a step that have one."""
