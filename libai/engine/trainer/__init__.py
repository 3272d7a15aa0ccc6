"""The eager and the graph trainer, and what both share."""
