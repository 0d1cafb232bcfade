"""Test cases: their axes and tensors, what an implementation admits of them, the cases that every cell must run."""
