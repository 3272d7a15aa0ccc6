"""Parts that models share: layers of transformers, initial weights, names of outputs."""
