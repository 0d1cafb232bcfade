"""Planted faults of the ops, and correct kernels beside them: what ``normcheck audit`` counts."""
