"""The judge on a GPU: the formulas of the plain judge in four Triton kernels, and what holds them to it."""
