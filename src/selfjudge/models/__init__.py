"""Models: the pair (target, draft, tokenizer), and the embedded models that are fetched from the package index."""
