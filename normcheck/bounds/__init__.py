"""Bounds without a run: what tensors that somebody else made must be, for the tests of other repositories."""
