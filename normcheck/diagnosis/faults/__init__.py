"""The known one-line faults, by what they are in: each is the few steps in which it differs from the textbook."""
