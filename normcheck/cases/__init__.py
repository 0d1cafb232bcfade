"""What is asked: the axes of a case, what an implementation admits of them, and the cases that every cell must run."""
