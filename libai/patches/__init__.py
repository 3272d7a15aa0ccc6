"""Fixes for OneFlow 0.9.0, and all code that uses its private APIs."""
