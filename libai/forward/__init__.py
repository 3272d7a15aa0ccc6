"""The contract of a model's forward, its side effects, and checks of the indices that it looks
up.
"""
