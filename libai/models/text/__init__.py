"""Models of text."""
