"""`LazyCall` describes a call that is made later.

`LazyConfig` loads, overrides and saves configs of such calls.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from libai.config import loader, overrides
from libai.config.instantiation import TARGET, describe, keyword_names, path_of
from libai.config.settings import schema
from libai.config.settings.coercion import OBJECTS, PLAIN, to_nodes
from libai.config.settings.errors import ConfigError
from libai.config.torch_files import recorded_files
from libai.utils.atomic import atomic_write_text
from libai.utils.installation import shipped_configs

_HEADER = "# Load it with libai.config.LazyConfig.load; it describes the same run.\n"


class LazyCall:
    """`LazyCall(target)(**arguments)` returns a `DictConfig` that describes the call without making
    it.

    `target` is a class, a function or a dotted string. It is stored as its dotted path if it has
    one, because a path can be saved. Arguments may be nested `LazyCall`s, lists, dicts and any
    other objects. Tuples become lists. They turn back into tuples at the call if the target's
    default is a tuple.

    >>> LazyCall("collections.Counter")(a=3)
    {'_target_': 'collections.Counter', 'a': 3}
    """

    def __init__(self, target: Callable[..., Any] | str):
        if not (
            hasattr(target, "__qualname__") or isinstance(target, str)
        ):  # a built module is callable
            raise ConfigError(
                "LazyCall takes a class, a function or a dotted path, found an object of type "
                f"{type(target).__name__}. Write LazyCall(Target)(argument=value)."
            )
        self._target = target

    def __repr__(self) -> str:
        return f"LazyCall({describe(self._target)})"

    def __call__(self, /, *args: Any, **arguments: Any) -> DictConfig:
        """Return the config of the call.

        Raises `ConfigError` for positional arguments: overrides need names.
        """
        target = self._target
        if args:
            names = keyword_names(target) if callable(target) else []
            right = (
                ", ".join(f"{name}={value!r}" for name, value in zip(names, args)) or "name=value"
            )
            call = repr(self)
            raise ConfigError(
                f"{call} got {len(args)} positional argument(s). Name the arguments, so that they "
                f"can be overridden: {call}({right})."
            )
        return OmegaConf.create(
            to_nodes(
                {
                    TARGET: target if isinstance(target, str) else path_of(target) or target,
                    **arguments,
                }
            ),
            flags=OBJECTS,
        )


class LazyConfig:
    """Functions for configs, grouped under the name that detectron2 and LiBai use."""

    apply_overrides = staticmethod(overrides.apply_overrides)

    @staticmethod
    def load(path: str | Path, *, trust: bool = False) -> DictConfig:
        """Load a `.py` or `.yaml` config. Both can run code.

        A `.yaml` file of another user is refused unless `trust` is true. Raises `ConfigError` with
        file, line and reason.
        """
        return loader.load(path, trust)

    @staticmethod
    def save(config: DictConfig, path: str | Path) -> None:
        """Write `config` atomically as YAML that `load` can read.

        Targets are written as dotted paths. Arguments that are classes or functions are written as
        calls of `libai.config.locate`. Raises `ConfigError` with a list of all values that have no
        path: lambdas, local functions and built objects.
        """
        text = to_yaml(config)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)


def get_config(path: str) -> DictConfig:
    """Load a config that is shipped with libai, for example
    `get_config("common/train.py").train`.
    """
    return loader.load(Path(shipped_configs(), path))


def to_yaml(config: DictConfig) -> str:
    """Return the text that `LazyConfig.save` writes."""
    problems: list[str] = []
    targets: list[str] = []
    plain = _plain(config, "", problems, targets)
    if problems:
        raise ConfigError(problems)
    parts = [_HEADER]
    folders = {
        str(folder): None
        for target in targets
        if (folder := loader.import_folder_of(target)) is not None
    }
    if folders:
        parts.append(OmegaConf.to_yaml({loader.IMPORT_FROM: list(folders)}))
    if files := recorded_files(targets):
        parts.append(OmegaConf.to_yaml({loader.TORCH_FILES: files}))
    docs = {
        **schema.LAZY_SECTIONS,
        **{name: cls.__doc__ or "" for name, cls in schema.TYPED_SECTIONS.items()},
    }
    for name, section in plain.items():
        comment = f"# {' '.join(docs[name].split())}\n" if name in docs else ""
        parts.append(comment + OmegaConf.to_yaml(OmegaConf.create({name: section})))
    return "\n".join(parts)


def _plain(value: Any, path: str, problems: list[str], targets: list[str]) -> Any:
    """Return `value` as dicts, lists and types that YAML supports.

    Interpolations are kept as they are written.

    Values that cannot be written are reported in `problems`. The paths of classes and functions are
    added to `targets`.
    """
    if isinstance(value, (DictConfig, ListConfig)) and (
        value._is_none() or value._is_interpolation()
    ):
        return value._value()
    if isinstance(value, DictConfig):
        return {
            key: _plain(item, f"{path}.{key!s}".lstrip("."), problems, targets)
            for key, item in value.items_ex(resolve=False)
        }
    if isinstance(value, ListConfig):
        items = enumerate(value._iter_ex(resolve=False))
        return [_plain(item, f"{path}[{index}]", problems, targets) for index, item in items]
    is_target = path.endswith(TARGET)
    if isinstance(value, PLAIN) and not isinstance(value, enum.Enum):
        if is_target and isinstance(value, str):
            targets.append(value)
        return value
    name = None
    if isinstance(value, enum.Enum):
        name = f"{describe(type(value))}.{value.name}"
    elif is_target or inspect.isclass(value) or inspect.isroutine(value):
        name = path_of(value)
        if name is None:
            problems.append(
                f"{path}: {describe(value)} has no dotted path, so a saved config could not refer "
                "to it. Define it at the top level of a module, such as a file in the config's "
                "folder."
            )
    else:
        kind = type(value).__name__
        problems.append(
            f"{path} holds a built {kind}, which a saved config cannot describe. In its place, "
            f"write LazyCall({kind})(...) or a LazyCall of the function that returns it."
        )
    targets.append(name or "")
    return name if is_target else {TARGET: "libai.config.locate", "path": name}
