"""Write a config as YAML that `load` turns back into the same config."""

from __future__ import annotations

import enum
import importlib
import inspect
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from libai.config import schema
from libai.config.errors import ConfigError
from libai.config.loader import IMPORT_FROM, import_folder_of
from libai.config.targets import TARGET, describe, path_of
from libai.utils.atomic import atomic_write_text

_HEADER = "# Load it with libai.config.LazyConfig.load; it describes the same run.\n"
_PLAIN = (bool, int, float, str, bytes, Path, type(None))


def save(config: DictConfig, path: str | Path) -> None:
    """Write `config` to `path`, whole or not at all (written beside it, then renamed).

    Targets are written as dotted paths, classes and functions among the arguments as `libai.config.locate` calls.
    Raises `ConfigError` that lists everything without a path: lambdas, local functions, built objects.
    """
    text = to_yaml(config)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text)


def to_yaml(config: DictConfig) -> str:
    """The text that `save` writes."""
    problems: list[str] = []
    plain = _plain(config, "", problems)
    if problems:
        raise ConfigError(problems)
    parts = [_HEADER]
    folders = list(dict.fromkeys(str(f) for target in _targets(plain) if (f := import_folder_of(target)) is not None))
    if folders:
        parts.append(OmegaConf.to_yaml({IMPORT_FROM: folders}))
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
    if isinstance(value, _PLAIN):
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
