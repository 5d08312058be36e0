"""The CUDA engine: a static cache, Triton kernels, captured graphs."""
