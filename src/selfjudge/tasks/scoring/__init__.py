"""How answers are found in text and compared."""
