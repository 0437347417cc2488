"""The prefill worker process: batches prompts, computes their KV and ships it to decode."""
