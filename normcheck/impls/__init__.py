"""Implementations of the ops: one file per library. Each module declares ``IMPLEMENTATIONS``."""
