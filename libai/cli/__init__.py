"""The `libai` command. main.py holds the table of subcommands. oneflow is imported only if a
subcommand needs it.
"""
