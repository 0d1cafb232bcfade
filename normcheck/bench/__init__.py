"""GB/s of kernels that were just verified. Imports gate and below."""
