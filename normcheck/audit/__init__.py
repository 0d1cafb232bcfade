"""The audit of the gate itself: planted faults, correct kernels, other projects' tolerances. Imports gate and below."""
