"""This project's own Triton kernels, and the remedy that lets bf16 kernels run under Triton's interpreter."""
