"""NVIDIA GPU code: fused kernels, CUDA graphs of decode steps, asynchronous KV copies."""
