"""Variants of other libraries. They run in an interpreter of their own that has neither oneflow nor libai."""
