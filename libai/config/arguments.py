"""Parse the command line of the training tools: a config, overrides and a few flags, in any order.

A launcher calls `check` before it starts any process, so that typos are found before the
rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libai.config.settings.errors import ConfigError, did_you_mean
from libai.config.settings.other_names import meant
from libai.config.validation import load_config
from libai.utils.parser import Parser

#: flags with an optional value, and the value used if it is omitted
OPTIONAL_VALUES = {"--resume": True, "--find-lr": "1e-7,10,100"}
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
    "--json": "print an error as JSON to stdout",
    "--quiet": "show only warnings, errors and the result; log.txt gets everything",
    "--reset": "with --resume, parts not to load from the checkpoint: optimizer,schedule,data",
}


@dataclass(frozen=True)
class Args:
    """The parsed command line."""

    config: str
    overrides: list[str]
    resume: bool | str = False
    reset: tuple[str, ...] = ()
    eval_only: bool = False
    dry_run: bool = False
    fast_dev_run: bool = False
    print_config: bool = False
    quiet: bool = False
    json: bool = False
    traceback: bool = False
    find_lr: str | bool = False


def parse_args(argv: Sequence[str], *, prog: str | None = None) -> Args:
    """Parse `CONFIG [overrides] [flags]`. The config may also be given as `--config-file CONFIG`.

    Raises `ConfigError` for a missing config, for a key that is given twice, and for an unknown
    flag, with the nearest known one.
    """
    parser = Parser(prog=prog, usage="%(prog)s CONFIG [key=value | +key=value | ~key ...] [flags]")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG and overrides",
        help="a config file, followed by settings",
    )
    parser.add_argument(
        "--config-file", metavar="CONFIG", help="the config, if it is not the first argument"
    )
    for flag, text in FLAGS.items():
        if flag in OPTIONAL_VALUES:
            parser.add_argument(flag, default=False, help=text)
        elif flag == "--reset":
            parser.add_argument(flag, metavar="PARTS", default="", help=text)
        else:
            parser.add_argument(flag, action="store_true", help=text)
    known, unknown = parser.parse_known_intermixed_args(_with_optional_values(argv))
    problems = [_unknown_flag(word, parser.flags) for word in unknown if word.startswith("-")]
    values = vars(known)
    for flag, without_value in OPTIONAL_VALUES.items():
        name = flag.lstrip("-").replace("-", "_")
        values[name] = without_value if values[name] == "" else values[name]
    values["reset"] = tuple(part.strip() for part in values["reset"].split(",") if part.strip())
    words, config = values.pop("words"), values.pop("config_file")
    if config is None and words and "=" not in words[0] and not words[0].startswith("~"):
        config = words.pop(0)
    if config is None and not problems:
        problems.append(
            "No config file is given. Start with one: CONFIG [key=value ...], such as "
            "configs/my.py."
        )
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and given.setdefault(key, value) != value:
            problems.append(f"{key} is given twice, as {given[key]} and as {value}. Give it once.")
    if sum(bool(values[name]) for name in ("dry_run", "eval_only", "find_lr")) > 1:
        problems.append(
            "--dry-run, --eval-only and --find-lr cannot be combined. Give one of them."
        )
    if problems:
        raise ConfigError(problems)
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
        is_plain = "=" not in word and not word.startswith(("-", "~", "+"))
        if is_plain and has_config and words and words[-1].removesuffix("=") in OPTIONAL_VALUES:
            words[-1] += word
            continue
        has_config = has_config or is_plain
        words.append(f"{word}=" if word in OPTIONAL_VALUES else word)
    return words


def _unknown_flag(flag: str, flags: Sequence[str]) -> str:
    name = flag.partition("=")[0]
    hint = meant(name.lstrip("-"))
    if "." in name or "=" in flag:
        return (
            f"{flag}: overrides are written key=value, without dashes: "
            f"{flag.lstrip('-')}{hint and f'.{hint}'}"
        )
    return (
        f"{flag}: unknown "
        f"flag.{did_you_mean(name, flags) or hint or ' The flags are: ' + ', '.join(flags) + '.'}"
    )


def check(config: str, args: Sequence[str], world_size: int) -> str:
    """Load `config`, apply the overrides in `args` and validate the result for `world_size` ranks.

    `args` may also contain flags. Returns the output folder. Raises `ConfigError`.
    """
    parsed = parse_args([*args, "--config-file", config], prog="train_net.py")
    return load_config(parsed.config, parsed.overrides, world_size).train.output_dir
