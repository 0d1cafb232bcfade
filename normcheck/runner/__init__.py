"""One call of a kernel, and what it leaves behind."""
