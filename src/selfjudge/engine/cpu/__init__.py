"""The CPU engine: one compiled library; weights are float32, int8 or blocks of a GGUF file."""
