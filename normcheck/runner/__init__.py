"""One call of an implementation, in memory that tells."""
