"""The command line: each command turns its arguments into one call. May import everything, inside functions."""
