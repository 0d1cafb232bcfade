"""Two implementations on the same cases: what moved between them, and which is nearer to the fp64 reference."""
