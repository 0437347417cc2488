"""Whole steps computed by C kernels on the CPU, from token ids to logits in one call."""
