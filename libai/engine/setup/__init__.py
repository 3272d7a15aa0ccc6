"""From a checked config to objects: what is supported, batch sizes, mesh, model and optimizer."""
