"""What is correct: one file per op. Each module declares ``OP``."""
