"""The CUDA engine: a static cache, Triton kernels, recorded graphs."""
