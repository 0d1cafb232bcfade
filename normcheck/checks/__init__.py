"""One case on one kernel: what it shows, and what is to be made of it."""
