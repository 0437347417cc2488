"""What only an NVIDIA GPU needs: fused kernels, graphs of whole steps, copies beside them."""
