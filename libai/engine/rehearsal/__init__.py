"""Compare the first updates of a run with the same updates made by a plain eager loop."""
