"""The native CPU backend: C kernels that compute a whole step, token ids to logits, in one call."""
