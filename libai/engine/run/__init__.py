"""The standard run: its folder, its start and end, and everything in between."""
