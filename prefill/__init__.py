"""The prefill worker process: batches prompts, computes their KV and sends it to decode."""
