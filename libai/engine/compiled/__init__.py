"""The compiled step: `nn.Graph`s of a model, how they are traced, and errors in the user's terms."""
