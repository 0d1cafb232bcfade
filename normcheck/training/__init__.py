"""A number for training loops that judge kernels written by programs."""
