"""Storage and writers for the numbers of a run."""
