"""One case on one kernel: what is judged of it, and how it is told."""
