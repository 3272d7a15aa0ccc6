"""Parts shared by several models: transformer layers, weight initialization and model outputs."""
