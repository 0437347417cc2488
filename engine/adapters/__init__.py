"""LoRA adapters: shapes and checks, tensors, and the rows of a step that use one."""
