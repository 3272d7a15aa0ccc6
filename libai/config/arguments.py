"""The command line of the training tools: a config, overrides and a few flags, in any order."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from libai.config.errors import ConfigError, did_you_mean
from libai.config.foreign_names import meant

FLAGS: dict[str, str] = {
    "--resume": "continue from the newest checkpoint in train.output_dir",
    "--eval-only": "evaluate once and stop",
    "--dry-run": "build everything, try an update, a checkpoint and an evaluation batch, and keep nothing",
    "--fast-dev-run": "a few iterations, evaluations and a checkpoint, to see that everything works",
    "--print-config": "print the config that would run and stop",
}


@dataclass(frozen=True)
class Args:
    """What the user typed. `extra`: a tool's own flags, by name without dashes, and whether they were given."""

    config: str
    overrides: list[str]
    resume: bool = False
    eval_only: bool = False
    dry_run: bool = False
    fast_dev_run: bool = False
    print_config: bool = False
    extra: Mapping[str, bool] = field(default_factory=dict)


def parse_args(
    argv: Sequence[str],
    *,
    prog: str | None = None,
    extra_flags: Mapping[str, str] | None = None,
    config_required: bool = True,
) -> Args:
    """Parse `CONFIG [overrides] [flags]`; `--config-file CONFIG` works as well.

    `extra_flags`: flag -> help of a tool's own switches; `config_required=False` allows none to be named (`""`).
    Raises `ConfigError` for an unknown flag, with the nearest one, and for a missing config.
    """
    extra_flags = dict(extra_flags or {})
    parser = _Parser(prog=prog, usage="%(prog)s CONFIG [key=value | +key=value | ~key ...] [flags]", allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="CONFIG and overrides", help="a config file, then settings")
    parser.add_argument("--config-file", metavar="CONFIG", help="the config, when it is not the first word")
    for flag, text in {**FLAGS, **extra_flags}.items():
        parser.add_argument(flag, action="store_true", help=text)
    switches = [*FLAGS, *extra_flags]
    with_value = [word for word in argv if word.partition("=")[0] in switches and "=" in word]
    if with_value:
        raise ConfigError([f"{word}: {word.partition('=')[0]} takes no value." for word in with_value])
    known, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown := [word for word in unknown if word.startswith("-")]:  # argparse adds the words behind a wrong flag
        raise ConfigError([_unknown_flag(flag, ["--config-file", *switches]) for flag in unknown])
    values = vars(known)
    words, config = values.pop("words"), values.pop("config_file")
    if config is None and words and "=" not in words[0] and not words[0].startswith("~"):
        config = words.pop(0)
    if config is None and config_required:
        raise ConfigError("No config file is named. Start with one: CONFIG [key=value ...], such as configs/my.py.")
    _refuse_contradictions(words)
    extra = {flag.lstrip("-"): values.pop(flag.lstrip("-").replace("-", "_")) for flag in extra_flags}
    return Args(config=config or "", overrides=words, extra=extra, **values)


def _refuse_contradictions(words: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that is given several values, of which only the last would count."""
    values: dict[str, str] = {}
    problems = []
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and values.setdefault(key, value) != value:
            problems.append(f"{key} is given twice, as {values[key]} and as {value}. Give it once.")
    if problems:
        raise ConfigError(problems)


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Usage: {self.format_usage().removeprefix('usage: ').strip()}")


def _unknown_flag(flag: str, flags: Sequence[str]) -> str:
    name = flag.partition("=")[0]
    hint = meant(name.lstrip("-"))
    if "." in name or "=" in flag:
        return f"{flag}: overrides are written key=value, without dashes: {flag.lstrip('-')}{hint and f'.{hint}'}"
    return f"{flag}: no such flag.{did_you_mean(name, flags) or hint or ' There are: ' + ', '.join(flags) + '.'}"
