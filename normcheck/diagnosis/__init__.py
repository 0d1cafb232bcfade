"""What a wrong output might be: known one-line faults, fitted to everything that the kernel returned."""
