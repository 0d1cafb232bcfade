"""Cells judged by other processes and other machines, by Dask: each job is a line of text, and so is its answer."""
