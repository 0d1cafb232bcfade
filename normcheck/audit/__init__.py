"""How good is the gate: planted faults, correct kernels, other projects' tolerances. Imports gate and below."""
