"""The training loop without a model: hooks, timing, events and the checks of what a user hands in."""
