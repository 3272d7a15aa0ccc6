"""The subcommands that look at runs which are there."""
