"""What is asked next of a kernel, by the seed and by what its cases took: no clock, no process, no tensor."""
