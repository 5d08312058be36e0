"""Small operations that our loop and vLLM's worker share, each beside its Triton kernel."""
