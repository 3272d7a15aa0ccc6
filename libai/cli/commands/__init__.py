"""One file a subcommand: `run(arguments) -> exit code`, and `build_parser()` for its help."""
