"""Calls of a kernel in a process that may die. Imports runner and below; never oracle or gate."""
