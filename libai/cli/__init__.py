"""The command `libai`: main.py has the table of subcommands. Needs no oneflow until a subcommand does."""
