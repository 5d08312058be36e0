"""Forward passes with a rewindable KV cache. Engines speak token ids only; text lives above them."""
