"""Planted faults of the four ops, and correct kernels beside them: what ``normcheck audit`` counts."""
