"""Lazy configs: Python files whose `LazyCall`s note calls, overrides of them, and `instantiate`, which makes them."""
