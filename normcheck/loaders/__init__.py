"""Loaders: kernels in the formats of other efforts, checked as they are handed over. Imports gate and below."""
