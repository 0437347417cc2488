"""Text processing: chat templates, tokenizer, incremental detokenizer, stop strings, tool calls."""
