"""Hooks that time the loop, profile it, and bring its numbers to the writers."""
