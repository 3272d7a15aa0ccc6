"""Say what a setting is: type, range, default and meaning; with a config also its value there.

Arguments of what a config names in model, optim, lr_scheduler and dataloader are known with the config:
`libai help model.hidden_sizes mlp_digits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from libai.cli.parser import Parser


def run(arguments: Sequence[str]) -> int:
    from libai.cli.main import COMMANDS, dispatch

    args = build_parser().parse_args(arguments)
    if args.key in COMMANDS:
        return dispatch([args.key, "--help"])
    print("\n".join(explain(args.key, args.config)))
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("key", metavar="KEY", help="a setting such as train.log_period, a section, or a command")
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a config file, or the name of a shipped one")
    return parser


def explain(key: str, config: str | None = None) -> list[str]:
    """The lines about a setting or a section."""
    from libai.config.reference import key_help

    found = key_help(key)
    lines = [key, f"  {found.doc}"]
    if found.kind:
        lines += [f"  type     {found.kind_in_limits}", f"  default  {found.default}"]
    lines += [f"  {name:<38}  {key_help(name).doc}" for name in found.keys]
    return lines + (_in_config(key, config) if config else [])


def _in_config(key: str, path: str) -> list[str]:
    from omegaconf import OmegaConf

    from libai.config import LazyConfig

    config = LazyConfig.load(path)
    value = OmegaConf.select(config, key, default="not set")
    lines = OmegaConf.to_yaml(value).rstrip().splitlines() if OmegaConf.is_config(value) else [str(value)]
    shown = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n    {line}" for line in lines)
    return [*_argument(key, config), f"  in {path}:{shown}"]


def _argument(key: str, config: Any) -> list[str]:
    """What the signature of the section's target says of an argument; nothing for a key of no target."""
    from omegaconf import DictConfig, OmegaConf

    from libai.config import target_of

    section, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, section) if section else None
    target = target_of(parent) if isinstance(parent, DictConfig) and "_target_" in parent else None
    if target is None:
        return []
    parameter = inspect.signature(target).parameters.get(name)
    where = f"{target.__module__}.{target.__qualname__}"
    if parameter is None:
        return [f"  {where} has no argument {name}"]
    annotation = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else inspect.formatannotation(parameter.annotation)
    )
    kind = "" if parameter.annotation is parameter.empty else f": {annotation}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return [f"  argument of {where}: {name}{kind}{default}"]
