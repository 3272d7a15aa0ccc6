"""Variants that use other libraries.

They run in a separate Python that has neither oneflow nor libai installed.
"""
