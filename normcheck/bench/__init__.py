"""The bench: GB/s of kernels that have just been verified. Imports gate and below."""
