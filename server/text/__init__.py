"""Text in and out: chat template, tokenizer, incremental detokeniser, stop strings."""
