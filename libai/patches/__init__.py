"""Patches: repairs of OneFlow 0.9.0, and every use of its private parts."""
