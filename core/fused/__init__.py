"""The fast training step: forward and backward of the whole unroll, written by hand around Triton kernels."""
