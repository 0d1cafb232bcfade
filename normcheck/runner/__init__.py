"""Calls of an implementation, in memory that shows stray reads and writes; the device, time limit and versions."""
