"""The standard run: its parts, mode and output folder, from the config to the report."""
