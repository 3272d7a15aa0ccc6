"""`validate`: one frozen, typed `RunConfig` from a config, or one error with everything that is wrong with it.

Device and mode are not judged here: what a mode cannot honour is refused by the engine (libai/engine/setup/support.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config import kinds
from libai.config.batch import batch_sizes_of, solve_data_parallel_size
from libai.config.combinations import refused
from libai.config.kinds import wrong_kind
from libai.config.lazy.instantiation import TARGET, target_of, unknown_arguments
from libai.config.lazy.lazy_config import LazyConfig
from libai.config.settings import schema
from libai.config.settings.coercion import OBJECTS, Mismatch, copy_config, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean, hint
from libai.utils.errors import first_line

#: lazy section of one call → what it must give
_KIND = {
    "model": kinds.MODULE,
    "optim": kinds.OPTIMIZER,
    "lr_scheduler": kinds.SCHEDULE,
    "momentum_scheduler": kinds.SCHEDULE,
}


@dataclass(frozen=True)
class RunConfig:
    """What will run: typed `train` and `graph`, and the lazy sections as read-only configs for `instantiate`."""

    train: schema.Train
    graph: schema.Graph
    model: Any
    optim: Any
    lr_scheduler: Any
    dataloader: Any
    momentum_scheduler: Any = None
    #: what was typed on the command line, for `overrides.txt`; applied already
    overrides: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """`"eager"`, `"graph"` or `"auto"`: the one place that reads `graph.enabled`."""
        return {False: "eager", True: "graph", "auto": "auto"}[self.graph.enabled]

    def to_config(self) -> DictConfig:
        """Everything as one plain config with all defaults filled in; loading it again gives the same run."""
        sections = {name: _resolved(getattr(self, name)) for name in schema.LAZY_SECTIONS}
        for name in schema.TYPED_SECTIONS:
            sections[name] = to_nodes(_plain_section(getattr(self, name)))
        return OmegaConf.create(sections, flags=OBJECTS)


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> RunConfig:
    """The config in a file, with `overrides` of the command line, checked for a run of `world_size` processes."""
    return validate(LazyConfig.apply_overrides(LazyConfig.load(path), list(overrides)), world_size)


def validate(config: Any, world_size: int = 1, required: Sequence[str] = ("model", "optim", "dataloader")) -> RunConfig:
    """Check `config` for a run of `world_size` processes and return it typed and frozen.

    The config itself is not changed. `required`: lazy sections that must be there. Raises one `ConfigError` that
    lists all problems: unknown keys, wrong types, values out of range, arguments that a target does not take, and
    combinations that cannot be. Imports the targets.
    """
    if not isinstance(config, DictConfig):
        raise ConfigError(f"validate takes what LazyConfig.load returns, found {type(config).__name__}.")
    config = copy_config(config)
    problems = [
        f"{name} is not a section of a config ({', '.join(schema.SECTIONS)})."
        f"{hint(name, schema.SECTIONS)}"
        " The name of a helper variable starts with an underscore."
        for name in map(str, config)
        if name not in schema.SECTIONS
    ]
    train_problems: list[str] = []
    train: schema.Train = _read(schema.Train, config, "train", train_problems)
    problems += train_problems
    graph: schema.Graph = _read(schema.Graph, config, "graph", problems)
    lazy = {name: _attempt(partial(config.get, name), name, problems) for name in schema.LAZY_SECTIONS}
    missing = [name for name in required if lazy[name] is None]
    if len(missing) > 2:
        raise ConfigError(
            f"the config has no {', no '.join(missing)}: is it the right file? Each is a LazyCall, such as `model = "
            "LazyCall(Target)(argument=value)`; configs/mlp_digits.py is an example."
        )
    problems += [
        f"{name} is missing: {schema.LAZY_SECTIONS[name]} Add `{name} = LazyCall(...)(...)` to the config."
        for name in missing
    ]
    for name in schema.LAZY_SECTIONS:
        problems += _check_section(name, lazy[name])
    problems += _check_evaluators(train.evaluation.evaluators, lazy["dataloader"])
    problems += _check_calls(train.extra_hooks, "train.extra_hooks", kinds.HOOK)
    problems += _check_writers(train.writers)
    if not train_problems:  # a number that could not be read would make more mistakes than there are
        problems += _impossible_sizes(train, world_size)
    if not problems:
        problems += refused(RunConfig(train=train, graph=graph, **lazy))
    if problems:
        raise ConfigError(problems)
    tensor = train.dist.tensor_parallel_size or 1
    pipeline = train.dist.pipeline_parallel_size or 1
    dist = dataclasses.replace(train.dist, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    train = dataclasses.replace(train, dist=dist)
    _freeze(config)
    return RunConfig(train=train, graph=graph, **lazy)


def _attempt(read: Callable[[], Any], path: str, problems: list[str]) -> Any:
    """The value that `read` gets out of a config; an interpolation that fails becomes a problem and None."""
    try:
        return read()
    except OmegaConfBaseException as error:
        problems.append(
            f"{path} takes its value from another setting, which cannot be read ({first_line(error).rstrip('.')}). Set "
            f"{path} itself, or restore what it refers to."
        )
        return None


def _read(cls: type, parent: Any, path: str, problems: list[str]) -> Any:
    """The schema class `cls` filled from the section at `path`; keys that are absent or wrong keep their defaults."""
    name = path.rpartition(".")[2]
    node = _attempt(partial(parent.get, name), path, problems)
    if node is None:
        if name in parent.keys():  # noqa: SIM118  `in parent` is false for ???
            problems.append(f"{path}=null: a section cannot be null. Remove it, or set {path}.key=value.")
        return cls()
    if isinstance(node, str) and hasattr(cls, "text_key"):
        return cls(**{cls.text_key: node})
    keys = {key.rpartition(".")[2]: key for key in schema.below(path)}
    if not isinstance(node, DictConfig):
        problems.append(f"{path}={node!r}: expected a section. Set {', '.join(list(keys.values())[:3])}.")
        return cls()
    unknown = [f"{path}.{name!s}" for name in node if name not in keys]
    problems += [f"{where}: no such setting.{hint(where, schema.all_paths())}" for where in unknown]
    values: dict[str, Any] = {}
    for name, where in keys.items():
        if name not in node.keys():  # noqa: SIM118  `in node` is false for ???
            continue
        key = schema.find(where)
        assert key is not None
        if isinstance(key, type):
            values[name] = _read(key, node, where, problems)
            continue
        if OmegaConf.is_missing(node, name):
            problems.append(_left_open(where))
            continue
        before = len(problems)
        value = _attempt(partial(node.__getitem__, name), where, problems)
        if isinstance(value, (DictConfig, ListConfig)):
            with suppress(OmegaConfBaseException):  # an interpolation that fails is told with its place below
                problems += map(_left_open, sorted(OmegaConf.missing_keys(value)))
        if len(problems) > before:
            continue
        try:
            values[name] = key.fit(value)
        except Mismatch as error:
            problems.append(f"{where}={value!r}: {error}.")
    return cls(**values)


def _impossible_sizes(train: schema.Train, world_size: int) -> Iterator[str]:
    """Lengths, meshes and batch sizes that cannot be, and what needs one process."""
    if train.on_exception == "return" and world_size > 1:
        yield (
            f"train.on_exception=return cannot be kept by {world_size} processes: a rank that failed would leave the "
            "others waiting for it. Remove it, or use one process."
        )
    dist = train.dist
    if not train.train_iter and not train.train_epoch:
        yield "train.train_iter and train.train_epoch are both 0, so nothing would be trained. Set one of them."
    tensor, pipeline = dist.tensor_parallel_size or 1, dist.pipeline_parallel_size or 1
    try:
        replicas = solve_data_parallel_size(world_size, dist.data_parallel_size, tensor, pipeline)
        batch_sizes_of(train, replicas)
    except ConfigError as error:
        yield from error.problems


def _left_open(path: str) -> str:
    return f"{path} is '???': the config leaves its value to you. Add {path}=value."


def _check_section(name: str, node: Any) -> list[str]:
    if node is None:
        return []
    if name in schema.SCHEDULES and isinstance(node, ListConfig):
        empty = [f"{name}=[] names no schedule. Set it to null, or add one."]
        return _check_calls(node, name, kinds.SCHEDULE) if node else empty
    if name in ("optim", "lr_scheduler") and isinstance(node, DictConfig) and node and TARGET not in node:
        lists = {key: item for key, item in node.items() if name == "lr_scheduler" and isinstance(item, ListConfig)}
        problems = []
        for key, item in lists.items():
            problems += _check_calls(item, f"{name}.{key!s}", kinds.SCHEDULE)
        return problems + _check_calls({key: item for key, item in node.items() if key not in lists}, name, _KIND[name])
    if name != "dataloader":
        return [] if _is_built(node) else _check_calls({name: node}, "", _KIND[name])
    if not isinstance(node, DictConfig):
        return [f"dataloader={node!r}: expected a section with {schema.LAZY_SECTIONS['dataloader']}"]
    problems = [
        f"dataloader.{key}: no such setting; a dataloader has train and test."
        + did_you_mean(f"dataloader.{key}", ["dataloader.train", "dataloader.test"])
        for key in map(str, node)
        if key not in ("train", "test")
    ]
    test = node.get("test")
    if node.get("train") is not None:
        problems += _check_calls({"train": node.train}, "dataloader", kinds.LOADER)
    if isinstance(test, ListConfig) or (isinstance(test, DictConfig) and TARGET in test):
        return [*problems, 'dataloader.test names its datasets: write dataloader.test = {"val": LazyCall(...)(...)}.']
    return problems + (_check_calls(test, "dataloader.test", kinds.LOADER) if test is not None else [])


def _check_evaluators(evaluators: Any, dataloader: Any) -> list[str]:
    test = dataloader.get("test") if isinstance(dataloader, DictConfig) else None
    datasets = list(map(str, test)) if isinstance(test, DictConfig) else []
    calls = calls_by_dataset(evaluators)
    named = {name.partition("/")[0] for name in calls if "/" in name}
    problems = [
        f"train.evaluation.evaluators.{name} names no {TARGET} and no dataset of dataloader.test "
        f"({', '.join(datasets)}). Write LazyCall(Target)(argument=value), or the name of a dataset."
        for name in sorted(named - set(datasets))
    ]
    return problems or _check_calls(calls, "train.evaluation.evaluators", kinds.EVALUATOR)


def _check_writers(writers: Any) -> list[str]:
    names = [writer for writer in writers if isinstance(writer, str)]
    problems = [
        f"train.writers names {name!r}: expected {', '.join(schema.WRITERS)}, or LazyCall(Writer)(argument=value)."
        f"{did_you_mean(name, schema.WRITERS)}"
        for name in names
        if name not in schema.WRITERS
    ]
    problems += [f"train.writers names {name} twice. Remove one." for name in set(names) if names.count(name) > 1]
    calls = [None if isinstance(writer, str) else writer for writer in writers]
    return problems or _check_calls(calls, "train.writers")


def calls_by_dataset(evaluators: Any) -> dict[str, Any]:
    """Name → LazyCall; `<dataset>/<name>` for what stands below the name of a dataset."""
    found: dict[str, Any] = {}
    for name, section in ((str(name), evaluators[name]) for name in evaluators):
        if isinstance(section, (dict, DictConfig)) and TARGET not in section:
            found.update({f"{name}/{inner!s}": section[inner] for inner in section})
        else:
            found[name] = section
    return found


def _check_calls(container: Any, path: str, kind: str = "") -> list[str]:
    """Problems of the calls in a mapping or list whose every entry must be a LazyCall, a built object or null.

    `kind`: what the calls must give, see `libai.config.kinds`.
    """
    keys = list(container) if isinstance(container, (dict, DictConfig)) else range(len(container))
    problems: list[str] = []
    for key in keys:
        where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
        if isinstance(container, (DictConfig, ListConfig)) and OmegaConf.is_missing(container, key):
            problems.append(_left_open(where))
            continue
        value = container[key]
        if value is None or _is_built(value):
            continue
        if not isinstance(value, (dict, DictConfig)) or TARGET not in value:
            problems.append(f"{where} names no {TARGET}. Write LazyCall(Target)(argument=value), or add {TARGET}.")
        else:
            problems += (wrong_kind(value, kind, where) if kind else []) or _check_arguments(value, where)
    return problems


def _is_built(value: Any) -> bool:
    return not isinstance(value, (str, int, float, list, dict, DictConfig, ListConfig))


def _check_arguments(node: Any, path: str) -> list[str]:
    """Problems of a node and everything below it: targets that do not exist, arguments that they do not take."""
    problems: list[str] = []
    if isinstance(node, (DictConfig, dict)):
        if TARGET in node:
            try:
                target = target_of(node)
                assert target is not None
                problems += unknown_arguments(target, [str(key) for key in node if key != TARGET], path)
            except ConfigError as error:
                problems += [f"{path}: {problem}" for problem in error.problems]
        for key in node:
            problems += _check_below(node, key, f"{path}.{key!s}")
    elif isinstance(node, (ListConfig, list)):
        for index in range(len(node)):
            problems += _check_below(node, index, f"{path}[{index}]")
    return problems


def _check_below(node: Any, key: Any, path: str) -> list[str]:
    if isinstance(node, (DictConfig, ListConfig)) and OmegaConf.is_missing(node, key):
        return [_left_open(path)]
    problems: list[str] = []
    value = _attempt(partial(node.__getitem__, key), path, problems)
    return problems or _check_arguments(value, path)


def _plain_section(section: Any) -> dict[str, Any]:
    return {
        field.name: _plain_section(value) if dataclasses.is_dataclass(value) else _resolved(value)
        for field in dataclasses.fields(section)
        for value in [getattr(section, field.name)]
    }


def _resolved(value: Any) -> Any:
    """A writable copy of a lazy section with its interpolations resolved."""
    return to_nodes(OmegaConf.to_container(value, resolve=True)) if OmegaConf.is_config(value) else value


def _freeze(node: Any) -> None:
    """Make `node` and all below it read-only; one by one, as OmegaConf leaves flags of its own in nested configs."""
    if isinstance(node, (DictConfig, ListConfig)):
        node._set_flag("readonly", True)
        keys: Iterable[Any] = node.keys() if isinstance(node, DictConfig) else range(len(node))
        for key in keys:
            _freeze(node._get_node(key))
