"""Compare the first updates of a run with the same updates made by a plain eager loop.

The trainers import this folder. A parameter called `trainer` in it is always a `ModelTrainer`, but
cannot be annotated as one.
"""
