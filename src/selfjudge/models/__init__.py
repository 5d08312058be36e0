"""Models: the pair (target + draft + tokenizer), and the embedded models fetched from the package index."""
