"""Golden records: what an implementation returned on a machine that had it, kept, and judged again on any other."""
