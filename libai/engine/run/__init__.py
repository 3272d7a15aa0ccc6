"""The standard run: its folder, its start and end, and what happens between."""
