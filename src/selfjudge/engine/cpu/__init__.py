"""The CPU engine: one compiled library, float32 or int8 weights."""
