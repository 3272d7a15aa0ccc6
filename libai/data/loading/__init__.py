"""From a dataset to the batches of each rank: sample order, loaders, workers."""
