"""Hooks that evaluate, and those that act on what an evaluation has measured."""
