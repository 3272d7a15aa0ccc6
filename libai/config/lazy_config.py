"""`LazyCall` notes a call that is made later; `LazyConfig` loads, overrides and saves what is built of them."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from libai.config import loader, overrides
from libai.config.instantiation import TARGET, describe, keyword_names, path_of
from libai.config.settings import schema
from libai.config.settings.coercion import OBJECTS, PLAIN, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.launch.installation import shipped_configs
from libai.utils.atomic import atomic_write_text

_HEADER = "# Load it with libai.config.LazyConfig.load; it describes the same run.\n"


class LazyCall:
    """`LazyCall(target)(**arguments)` is a `DictConfig` that holds the call without making it.

    `target`: a class, a function or a dotted string. It is kept as its dotted path where it has one, so that the
    config can be saved. Arguments may be nested `LazyCall`s, lists, dicts and any object; tuples become lists, and
    turn back into tuples where the target's own default is one.

    >>> LazyCall("collections.Counter")(a=3)
    {'_target_': 'collections.Counter', 'a': 3}
    """

    def __init__(self, target: Callable[..., Any] | str) -> None:
        if not (callable(target) or isinstance(target, str)):
            raise ConfigError(
                f"LazyCall takes a class, a function or a dotted path, found {target!r} "
                f"({type(target).__name__}). Write LazyCall(Target)(argument=value)."
            )
        self._target = target

    def __call__(self, /, *args: Any, **arguments: Any) -> DictConfig:
        """Return the config of the call. Positional arguments are refused: overrides need names."""
        if args:
            names = keyword_names(self._target)[: len(args)] if callable(self._target) else []
            right = ", ".join(f"{name}={value!r}" for name, value in zip(names, args)) or "name=value"
            raise ConfigError(
                f"LazyCall({describe(self._target)}) got {len(args)} positional argument(s). Arguments need their "
                f"names, so that they can be overridden: LazyCall({describe(self._target)})({right})."
            )
        target = self._target if isinstance(self._target, str) else path_of(self._target) or self._target
        return OmegaConf.create(to_nodes({TARGET: target, **arguments}), flags=OBJECTS)


class LazyConfig:
    """Functions on configs, gathered under the name by which detectron2 and LiBai users know them."""

    @staticmethod
    def load(path: str | Path, keys: str | Sequence[str] | None = None) -> Any:
        """Load a `.py` or `.yaml` config. `keys`: one section name returns that section, several a tuple of them.

        Raises `ConfigError` with file, line and reason.
        """
        config = loader.load(path)
        if keys is None:
            return config
        names = [keys] if isinstance(keys, str) else list(keys)
        missing = [name for name in names if name not in config]
        if missing:
            found = ", ".join(map(str, config)) or "nothing"
            raise ConfigError(f"{path} defines no {missing[0]!r}, only {found}.{did_you_mean(missing[0], config)}")
        return config[keys] if isinstance(keys, str) else tuple(config[name] for name in names)

    @staticmethod
    def apply_overrides(config: DictConfig, arguments: Sequence[str]) -> DictConfig:
        """Return a copy of `config` with `key=value`, `+key=value` and `~key` applied; see `overrides.py`."""
        return overrides.apply_overrides(config, arguments)

    @staticmethod
    def save(config: DictConfig, path: str | Path) -> None:
        """Write `config` as YAML, whole or not at all; `load` reads it back.

        Targets are written as dotted paths, classes and functions among the arguments as `libai.config.locate` calls.
        Raises `ConfigError` that lists everything without a path: lambdas, local functions, built objects.
        """
        text = to_yaml(config)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)


def get_config(path: str) -> DictConfig:
    """Load a config that comes with libai, such as `get_config("common/train.py").train`."""
    return loader.load(Path(shipped_configs(), path))


def to_yaml(config: DictConfig) -> str:
    """The text that `LazyConfig.save` writes."""
    problems: list[str] = []
    plain = _plain(config, "", problems)
    if problems:
        raise ConfigError(problems)
    parts = [_HEADER]
    folders = list(
        dict.fromkeys(str(f) for target in _targets(plain) if (f := loader.import_folder_of(target)) is not None)
    )
    if folders:
        parts.append(OmegaConf.to_yaml({loader.IMPORT_FROM: folders}))
    for name, section in plain.items():
        doc = schema.LAZY_SECTIONS.get(name) or (schema.TYPED_SECTIONS[name].__doc__ if name in schema.SECTIONS else "")
        parts.append((f"# {doc}\n" if doc else "") + OmegaConf.to_yaml(OmegaConf.create({name: section})))
    return "\n".join(parts)


def _plain(value: Any, path: str, problems: list[str]) -> Any:
    """`value` as dicts, lists and what YAML knows; interpolations stay as they are written."""
    if isinstance(value, (DictConfig, ListConfig)):
        if value._is_none() or value._is_missing() or value._is_interpolation():
            return value._value()
        if isinstance(value, ListConfig):
            return [_plain(item, f"{path}[{i}]", problems) for i, item in enumerate(value._iter_ex(resolve=False))]
        plain: dict[Any, Any] = {}
        for key, item in value.items_ex(resolve=False):
            where = f"{path}.{key!s}".lstrip(".")
            plain[key] = (_target_path if key == TARGET else _plain)(item, where, problems)
        return plain
    if isinstance(value, enum.Enum):
        return {TARGET: "libai.config.locate", "path": f"{describe(type(value))}.{value.name}"}
    if isinstance(value, PLAIN):
        return value
    if inspect.isclass(value) or inspect.isroutine(value):
        return {TARGET: "libai.config.locate", "path": _target_path(value, path, problems)}
    problems.append(
        f"{path} holds a built {type(value).__name__}, which a saved config cannot describe. "
        f"Write LazyCall({type(value).__name__})(...) in its place."
    )
    return None


def _target_path(target: Any, path: str, problems: list[str]) -> str | None:
    found = target if isinstance(target, str) else path_of(target) or _path_by_import(target)
    if found is None:
        problems.append(
            f"{path}: {describe(target)} has no dotted path, so a saved config could not name it. "
            "Define it at the top level of a module (a file beside the config will do)."
        )
    return found


def _path_by_import(target: Any) -> str | None:
    """The path of a class or function of a config file, which was run without being imported."""
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", "<none>")
    if not module or module == "__main__" or "<" in qualname:
        return None
    try:
        found = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
        return f"{module}.{qualname}" if inspect.getsource(found) == inspect.getsource(target) else None
    except Exception:  # importing runs the user's file, which may raise anything; then it has no path
        return None


def _targets(plain: Any) -> list[str]:
    if isinstance(plain, dict):
        own = [plain[key] for key in (TARGET, "path") if TARGET in plain and isinstance(plain.get(key), str)]
        return own + [target for item in plain.values() for target in _targets(item)]
    return [target for item in plain for target in _targets(item)] if isinstance(plain, list) else []
