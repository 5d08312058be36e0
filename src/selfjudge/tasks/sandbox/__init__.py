"""Untrusted programs, run with limits."""
