"""Turn a config into a frozen, typed `RunConfig`, or raise one error that lists all its problems.

Device and mode are not checked here. The engine calls `check_supported` in
libai/config/combinations.py, which refuses settings that a mode cannot honour.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from libai.config.combinations import impossible_sizes, refused
from libai.config.instantiation import (
    TARGET,
    items_of,
    kinds_of_arguments,
    read_item,
    target_of,
    unknown_arguments,
)
from libai.config.lazy_config import LazyConfig
from libai.config.optimizer_numbers import wrong_number
from libai.config.overrides import format_override
from libai.config.run_config import RunConfig
from libai.config.settings import schema
from libai.config.settings.coercion import Mismatch, coerce, copy_config
from libai.config.settings.errors import ConfigError, did_you_mean, hint
from libai.utils.installation import docs_page


def load_config(
    path: str | Path, overrides: Sequence[str] = (), world_size: int = 1, *, trust: bool = False
) -> RunConfig:
    """Load a config file, apply `overrides`, and check the result for a run of `world_size`
    processes.

    `trust` is as in `LazyConfig.load`.
    """
    config = LazyConfig.load(path, trust=trust)
    return validate(LazyConfig.apply_overrides(config, overrides), world_size)


def validate(
    config: Any, world_size: int = 1, required: Sequence[str] = ("model", "optim", "dataloader")
) -> RunConfig:
    """Check `config` for a run of `world_size` processes and return it typed and frozen.

    `config` is not changed. `required` lists the lazy sections that must be present. Raises one
    `ConfigError` that lists all problems: unknown keys, wrong types, values out of range, arguments
    that a target does not accept, and impossible combinations. The targets are imported, except if
    problems have already been found and importing oneflow would take seconds.
    """
    if not isinstance(config, DictConfig):
        raise ConfigError(
            f"validate expects the result of LazyConfig.load, found {type(config).__name__}."
        )
    config = copy_config(config)
    problems = [
        f"{name}: no such setting.{hint(name, schema.SECTIONS)} The sections are "
        f"{', '.join(schema.SECTIONS)}; in a file, the name of a helper variable starts with an "
        "underscore."
        for name in map(str, config)
        if name not in schema.SECTIONS
    ]
    train: schema.Train = _read(schema.Train, config, "train", problems)
    graph: schema.Graph = _read(schema.Graph, config, "graph", problems)
    is_typed_sound = not problems
    lazy: dict[str, Any] = {}
    for name in schema.LAZY_SECTIONS:
        lazy[name] = _read_item(config, name, name, problems) if name in config.keys() else None  # noqa: SIM118
    missing = [name for name in required if lazy[name] is None]
    if len(missing) > 2:
        raise ConfigError(
            f"the config has no {', no '.join(missing)}: is it the right file? Each is a "
            "LazyCall, such as `model = LazyCall(Target)(argument=value)`; configs/mlp_digits.py "
            "is an example."
        )
    problems += [
        f"{name} is missing: {schema.LAZY_SECTIONS[name]} Add `{name} = LazyCall(...)(...)` to "
        "the config."
        for name in missing
    ]
    if is_typed_sound:  # a number that could not be read would cause misleading follow-up errors
        problems += impossible_sizes(train, world_size)
    if not problems or "oneflow" in sys.modules:
        _check_lazy(lazy, train, problems)
    run = RunConfig(train=train, graph=graph, **lazy)
    problems = problems or refused(run)
    if problems:
        raise ConfigError(problems)
    _freeze(config)
    return run


def _freeze(node: Any) -> None:
    """Make `node` and everything below it read-only.

    Nodes of a `LazyCall` do not inherit the flags of a parent.
    """
    if OmegaConf.is_config(node):
        node._set_flag("readonly", True)
        for key, _ in items_of(node, ""):
            _freeze(node._get_node(key))


def _read_item(config: Any, key: Any, path: str, problems: list[str]) -> Any:
    """Return a value of a config.

    If it cannot be read, add the reason to `problems` and return None.
    """
    try:
        return read_item(config, key, path)
    except ConfigError as error:
        problems += error.problems
        return None


def _read(cls: type, parent: Any, path: str, problems: list[str]) -> Any:
    """Return the schema class `cls`, filled from the section at `path`.

    Missing or wrong values keep their default.
    """
    name = path.rpartition(".")[2]
    if name not in parent.keys():  # noqa: SIM118  `in parent` is false for ???
        return cls()
    before = len(problems)
    node = _read_item(parent, name, path, problems)
    if len(problems) > before:
        return cls()
    if isinstance(node, str) and hasattr(cls, "text_key"):
        node = {cls.text_key: node}
    if not isinstance(node, Mapping):
        problems.append(f"{format_override(path, node)}: {schema.section_expected(path)}")
        return cls()
    values = {}
    for key, where in items_of(node, path):
        setting = schema.find(where)
        if setting is None:
            page = docs_page("config.md")
            otherwise = f" The keys of {path} are fixed; {page} lists them."
            problems.append(
                f"{where}: no such setting.{hint(where, schema.all_paths()) or otherwise}"
            )
        elif isinstance(setting, type):
            values[key] = _read(setting, node, where, problems)
        else:
            before = len(problems)
            value = _read_item(node, key, where, problems)
            _check_below(value, where, problems)
            if len(problems) > before:
                continue
            try:
                values[key] = setting.fit(value)
            except Mismatch as error:
                default = format_override(" (default", setting.default).replace("=", " ", 1)
                default = "" if setting.default in (None, "") else f"{default})"
                problems.append(f"{format_override(where, value)}: {error}{default}.")
    return cls(**values)


def _check_lazy(lazy: Mapping[str, Any], train: schema.Train, problems: list[str]) -> None:
    """Check all values that must be a LazyCall, a built object or null, and everything below
    them.
    """
    loaders = lazy["dataloader"]
    if not isinstance(loaders, (Mapping, type(None))):
        wanted = schema.LAZY_SECTIONS["dataloader"]
        problems.append(
            f"{format_override('dataloader', loaders)}: expected a section with {wanted}"
        )
        loaders = None
    parts = {
        str(key): _read_item(loaders, key, where, problems)
        for key, where in items_of(loaders or {}, "dataloader")
    }
    for where in [f"dataloader.{key}" for key in parts if key not in ("train", "test")]:
        close = did_you_mean(where, ["dataloader.train", "dataloader.test"])
        problems.append(f"{where}: no such setting; a dataloader has train and test.{close}")
    test = parts.get("test")
    if test is not None and (not isinstance(test, Mapping) or TARGET in test):
        problems.append(
            "the datasets of dataloader.test have names: expected a section, dataloader.test = "
            '{"val": LazyCall(...)(...)}.'
        )
        test = None
    datasets = list(map(str, test or {}))
    evaluators = train.evaluation.evaluators
    if TARGET in evaluators:
        problems.append(
            "train.evaluation.evaluators is one evaluator: expected names, "
            "train.evaluation.evaluators = "
            '{"NAME": LazyCall(...)(...)}.'
        )
    for name, section in evaluators.items():
        if isinstance(section, Mapping) and TARGET not in section and str(name) not in datasets:
            problems.append(
                f"train.evaluation.evaluators.{name!s} has no {TARGET} and is not a dataset of "
                f"dataloader.test ({', '.join(datasets)}). Write "
                "LazyCall(Target)(argument=value), or a dataset's name."
            )
    names = [writer for writer in train.writers if isinstance(writer, str)]
    if len(set(names)) < len(names) or not set(names) <= set(schema.WRITERS):
        problems.append(
            f"train.writers={names}: expected each of {', '.join(schema.WRITERS)} at most once, or "
            "LazyCall(Writer)(argument=value)."
        )
    writers = [None if writer in names else writer for writer in train.writers]
    # path, node, and maximum number of levels of names or lists above a call
    for path, section, depth in (
        ("dataloader.train", parts.get("train"), 0),
        ("dataloader.test", test or None, 1),
        ("model", lazy["model"], 0),
        ("optim", lazy["optim"], 1),
        ("lr_scheduler", lazy["lr_scheduler"], 2),
        ("momentum_scheduler", lazy["momentum_scheduler"], 1),
        ("train.evaluation.evaluators", evaluators or None, 2),
        ("train.extra_hooks", train.extra_hooks or None, 1),
        ("train.writers", writers or None, 1),
    ):
        _check_calls(section, path, depth, problems)


def _check_calls(node: Any, path: str, depth: int, problems: list[str]) -> None:
    """Check the calls in a section of at most `depth` levels."""
    is_call = isinstance(node, Mapping) and TARGET in node
    if depth and not is_call and isinstance(node, (list, Mapping, ListConfig)) and len(node):
        for key, where in items_of(node, path):
            _check_calls(_read_item(node, key, where, problems), where, depth - 1, problems)
    elif not is_call and isinstance(node, (str, int, float, list, Mapping, ListConfig)):
        problems.append(
            f"{path} has no {TARGET}: expected a section, LazyCall(Target)(argument=value), "
            f"found {format_override('', node)[1:]}."
        )
    else:
        _check_below(node, path, problems, has_calls=True)


def _check_below(node: Any, path: str, problems: list[str], has_calls: bool = False) -> None:
    """Check that everything below `node` can be read and, if it may hold calls, that targets accept
    their arguments.

    Values are converted to the types that targets declare, for example 1 to 1.0 or "off" to False.
    """
    if isinstance(node, (str, bytes)) or not isinstance(node, (Mapping, Sequence)):
        return
    kinds = {}
    if has_calls:
        try:
            target = target_of(node, path)
        except ConfigError as error:
            problems += error.problems
            target = None
        if target is not None:
            names = [str(key) for key in node if key != TARGET]
            problems += unknown_arguments(target, names, path)
            kinds = kinds_of_arguments(target)
    for key, where in items_of(node, path):
        value = _read_item(node, key, where, problems)
        # Skip null, for which the run may provide a value, and objects, which the target checks
        # itself.
        is_plain = isinstance(value, (bool, int, float, str, list, Mapping, ListConfig))
        if key in kinds and is_plain and not (isinstance(value, Mapping) and TARGET in value):
            try:
                converted = coerce(value, kinds[key])
            except Mismatch as error:
                problems.append(f"{format_override(where, value)}: {error}.")
                continue
            if converted is not value:
                node[key] = value = converted  # type: ignore[index]
        if path.startswith("optim") and (reason := wrong_number(str(key), value)):
            problems.append(f"{where}={value}: {reason}")
        _check_below(value, where, problems, has_calls)


def calls_by_dataset(evaluators: Any) -> dict[str, Any]:
    """Return name -> LazyCall.

    Evaluators in the section of a dataset are named `<dataset>/<name>`.
    """
    found = {}
    for name, section in evaluators.items():
        if isinstance(section, Mapping) and TARGET not in section:
            found.update({f"{name!s}/{inner!s}": section[inner] for inner in section})
        else:
            found[str(name)] = section
    return found
