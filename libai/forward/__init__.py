"""Side effects of a model's forward: found, then made right or refused."""
