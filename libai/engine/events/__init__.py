"""Numbers of a run: where they are kept, and where they are written."""
