"""Compiled training steps: graphs of a model, the tracing of its forward, and explanations of build
errors.
"""
