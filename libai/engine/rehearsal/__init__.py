"""The first updates of a run made twice, eagerly as a plain loop would and as the run makes them, and compared.

The trainers import this folder, so that a `trainer` in it, always a `ModelTrainer`, has no type.
"""
