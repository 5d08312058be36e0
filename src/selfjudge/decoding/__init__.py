"""The cycle of speculative decoding: acceptance rules, the loop, and the text layer above it."""
