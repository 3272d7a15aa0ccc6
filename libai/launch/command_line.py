"""Read command lines: a config, overrides and flags, in any order.

The launcher, the commands that start training and the training program use this reader, so a typo
is found before any process starts. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from libai.utils.errors import UserError

#: flags with an optional value
_OPTIONAL_VALUES = ("--resume", "--find-lr")
#: flags whose next word is their value
_NEED_VALUES = ("--reset", "--max-restarts")
#: flags that exclude each other
_EXCLUSIVE = ("dry_run", "eval_only", "find_lr")
#: positional arguments of commands that take settings
_SETTINGS = ("words", "overrides", "settings")
#: flag of the training program -> its help
FLAGS = {
    "--resume": (
        "continue from the newest checkpoint in train.output_dir, or from a PATH that follows "
        "the flag"
    ),
    "--find-lr": (
        "try learning rates, undo the updates and suggest a rate; LOWEST,HIGHEST,UPDATES may "
        "follow (default 1e-7,10,100)"
    ),
    "--eval-only": "evaluate once and stop",
    "--dry-run": (
        "build everything and try an update, a checkpoint and an evaluation batch, without "
        "keeping anything"
    ),
    "--fast-dev-run": (
        "run a few iterations, evaluations and a checkpoint to check that everything works"
    ),
    "--print-config": "print the resolved config and exit",
    "--traceback": (
        "if the run fails, show all frames of the traceback, not only the ones in your files"
    ),
    "--json": "print the result of an evaluation, or an error, as JSON to stdout",
    "--quiet": "show only warnings, errors and the result; log.txt gets everything",
    "--trust": "open the config.yaml of a run of another user, which can run any code as you",
    "--reset": "with --resume, parts not to load from the checkpoint: optimizer,schedule,data",
}
#: flag that the launcher takes -> its help
LAUNCHER_FLAGS = {
    "--procs": "processes on this machine (default 1)",
    "--max-restarts": "restart a failed job up to N times (default 0)",
}
#: flags of `libai eval`
EVAL_FLAGS = {
    "--checkpoint": "best, last, a name or a path (default: best after train.load_best_at_end)",
    "--input": "evaluate on this .csv or .jsonl file, which the run's dataset encodes",
}
#: flag with a value -> arguments of `add_argument`
_VALUES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_OPTIONAL_VALUES, {"default": False}),
    "--reset": {"metavar": "PARTS", "default": ""},
    "--procs": {"metavar": "PROCS"},
    "--max-restarts": {"metavar": "N", "nargs": "?", "const": ""},
    "--checkpoint": {"metavar": "NAME"},
    "--input": {"metavar": "FILE"},
}


@dataclass(frozen=True)
class Args:
    """The parsed command line of the training program."""

    config: str
    overrides: list[str]
    resume: bool | str = False
    reset: tuple[str, ...] = ()
    eval_only: bool = False
    dry_run: bool = False
    fast_dev_run: bool = False
    print_config: bool = False
    quiet: bool = False
    trust: bool = False
    json: bool = False
    traceback: bool = False
    find_lr: str | bool = False


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` of a command, without abbreviations.

    Mistakes raise `UserError` with the nearest flag.
    """

    def __init__(self, description: str | None = None, **options: Any):
        super().__init__(
            description=inspect.cleandoc(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def add_flag(self, name: str, about: str = "") -> None:
        """Add a flag that is off unless it is given, such as one of `FLAGS`."""
        self.add_argument(name, action="store_true", help=about or FLAGS[name])

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message, and with the nearest flag if a flag is unknown."""
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if unknown.startswith("-"):
            message = self._explain_unknown(unknown)
        message = message.replace("ignored explicit argument", "takes no value, found")
        stop = "" if message.endswith((".", "?")) else "."
        raise UserError(f"{message}{stop} `{self.prog} --help` lists the arguments.")

    def _explain_unknown(self, word: str) -> str:
        # imported here because a correct command line does not need them
        from libai.config.settings.errors import did_you_mean
        from libai.config.settings.other_names import meant

        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        flags = [flag for action in shown for flag in action.option_strings if flag[:2] == "--"]
        name, equals, _ = word.partition("=")
        close = did_you_mean(name, flags)
        takes_settings = any(action.dest in _SETTINGS for action in self._actions)
        hint = meant(name.lstrip("-")) if takes_settings else ""
        all_flags = f" The flags are {', '.join(flags)}."
        if takes_settings and ("." in name or (equals and hint and not close)):
            right = word.lstrip("-")
            return f"{word}: overrides are written key=value, without dashes: {right}.{hint}"
        return f"{word}: unknown flag.{close or hint or all_flags}"


def is_override(word: str) -> bool:
    """Return True if `word` has the form of `key=value`, `+key=value` or `~key`.

    The name of an existing file or folder, and text with a slash before the first `=`, is a path
    such as `out/lr=1e-3`.

    >>> is_override("train.seed=1"), is_override("~train.seed"), is_override("out/lr=1e-3")
    (True, True, False)
    """
    if os.path.lexists(word):
        return False
    key, equals, _ = word.partition("=")
    return word.startswith(("~", "+")) or (bool(equals) and "/" not in key)


def take_first_path(words: list[str]) -> str | None:
    """Remove and return the first word that is neither a flag, a value of one nor an override: a
    config or run.
    """
    for index, word in enumerate(words):
        is_value = index > 0 and words[index - 1] in _NEED_VALUES
        if not word.startswith("-") and not is_value and not is_override(word):
            return words.pop(index)
    return None


def build_parser(flags: Mapping[str, str], **options: Any) -> Parser:
    """Return a parser for `flags`, a table such as `FLAGS`."""
    parser = Parser(**options)
    for flag, text in flags.items():
        names = ["-n", flag] if flag == "--procs" else [flag]
        parser.add_argument(*names, help=text, **_VALUES.get(flag, {"action": "store_true"}))
    return parser


def take_flag(flag: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of a flag in `LAUNCHER_FLAGS`, or None, and the other arguments unchanged.

    >>> take_flag("--procs", ["mlp_digits", "-n", "2", "--resume"])
    ('2', ['mlp_digits', '--resume'])
    """
    parser = build_parser({flag: ""}, add_help=False)
    known, rest = parser.parse_known_args(list(arguments))
    return getattr(known, flag.lstrip("-").replace("-", "_")), rest


def take_restarts(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Return the number of restarts, from `--max-restarts N` or else from the variable
    MAX_RESTARTS, and the other arguments.
    """
    text, rest = take_flag("--max-restarts", arguments)
    name = "--max-restarts"
    if text is None:
        name = "MAX_RESTARTS"
        text = environment.get(name) or "0"
    if not text.isdecimal():
        raise UserError(
            f"{name} is {text!r}; it must be the number of restarts after failures, a whole number."
        )
    return int(text), rest


def parse_args(argv: Sequence[str], *, prog: str | None = None) -> Args:
    """Parse `CONFIG [overrides] [flags]`. The config may also be given as `--config-file CONFIG`.

    Raises `UserError` for a missing config, a key that is given twice, flags that exclude each
    other, and unknown flags, with the nearest known one.
    """
    usage = "%(prog)s CONFIG [key=value | +key=value | ~key ...] [flags]"
    parser = build_parser(FLAGS, prog=prog, usage=usage)
    name = "CONFIG and overrides"
    about = "a config file, followed by settings"
    parser.add_argument("words", nargs="*", default=[], metavar=name, help=about)
    about = "the config, if it is not the first argument"
    parser.add_argument("--config-file", metavar="CONFIG", help=about)
    values = vars(parser.parse_intermixed_args(_with_optional_values(argv)))
    values["resume"] = values["resume"] == "" or values["resume"]
    values["find_lr"] = "1e-7,10,100" if values["find_lr"] == "" else values["find_lr"]
    values["reset"] = tuple(part.strip() for part in values["reset"].split(",") if part.strip())
    words = values.pop("words")
    config = values.pop("config_file")
    if config is None and words and not is_override(words[0]):
        config = words.pop(0)
    if config is None:
        raise UserError(
            "No config file is given. Start with one: CONFIG [key=value ...], such as "
            "configs/my.py."
        )
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and given.setdefault(key, value) != value:
            raise UserError(f"{key} is given twice, as {given[key]} and as {value}. Give it once.")
    if sum(bool(values[name]) for name in _EXCLUSIVE) > 1:
        raise UserError(
            "--dry-run, --eval-only and --find-lr cannot be combined. Give one of them."
        )
    return Args(config=config, overrides=words, **values)


def _with_optional_values(argv: Sequence[str]) -> list[str]:
    """Rewrite `--resume PATH` as `--resume=PATH`, and `--resume` without a value as `--resume=`;
    also `--find-lr`.

    The next argument is the value, unless it is a setting, a flag or the config. The first plain
    argument is the config if `--config-file` is not given.
    """
    words: list[str] = []
    has_config = any(word.partition("=")[0] == "--config-file" for word in argv)
    for word in argv:
        is_plain = not word.startswith("-") and not is_override(word)
        if is_plain and has_config and words and words[-1].removesuffix("=") in _OPTIONAL_VALUES:
            words[-1] += word
            continue
        has_config = has_config or is_plain
        words.append(f"{word}=" if word in _OPTIONAL_VALUES else word)
    return words
