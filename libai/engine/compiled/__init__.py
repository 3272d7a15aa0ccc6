"""The compiled step: `nn.Graph`s of a model, how it is traced, and errors of that in the user's terms."""
