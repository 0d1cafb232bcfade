"""Who computes an op: one file per library. Each module declares ``IMPLEMENTATIONS``."""
