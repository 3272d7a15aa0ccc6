"""Whole runs compared: on every mesh, and resumed against never stopped."""
