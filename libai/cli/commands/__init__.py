"""One file per subcommand.

Each has `run(arguments) -> exit code`, and `build_parser()` for its help.
"""
