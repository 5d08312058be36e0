"""Adapters to other engines; nothing in the core imports them."""
