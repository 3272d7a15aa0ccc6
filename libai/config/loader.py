"""Load config files: plain Python, with relative imports of other config files, or YAML saved by a
run.

Each load executes its files in a new package with a unique name. Python's import system therefore
executes them again, and changes to one config do not affect another.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config import torch_files
from libai.config.instantiation import CONFIG_PACKAGE
from libai.config.settings.coercion import OBJECTS, copy_config, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.config.settings.other_names import meant
from libai.config.settings.schema import (
    LAZY_SECTIONS,
    SCHEDULES,
    SECTIONS,
    TYPED_SECTIONS,
    defaults,
)
from libai.config.torch_files import CONFIG_BUILTINS, remember_files
from libai.launch.request import find_config
from libai.utils import installation
from libai.utils.errors import UserError
from libai.utils.ownership import refuse_other_owners
from libai.utils.rank_notes import START_VARIABLE

IMPORT_FROM = "_import_from_"
"""Key of a saved config: the folders in which the modules of its targets were found."""
TORCH_FILES = "_torch_files_"
"""Key of a saved config: the modules of its targets in which `torch` is OneFlow."""

_import_folders: list[Path] = []
_loads = itertools.count()


def _now(form: str) -> str:
    """Resolve `${now:%Y-%m-%d_%H-%M-%S}`, as in Hydra, to the local start time of the job, the same
    on all ranks.
    """
    return time.strftime(form, time.localtime(float(os.environ.get(START_VARIABLE) or time.time())))


OmegaConf.register_new_resolver("now", _now, replace=True)


def load(path: str | Path, trust: bool = False) -> DictConfig:
    """Load a `.py` config (its public dicts and LazyCalls), a saved `.yaml` config, or a shipped
    config by its name.

    A saved config of another user is refused unless `trust` is true.

    The folder of a `.py` file is added to `sys.path` permanently. Raises `UserError` if the file
    does not exist, and `ConfigError` with file and line for any error in it.
    """
    path = Path(find_config(str(path)))
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path, trust)
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a config file: expected a .py or a .yaml file.")
    source = path.resolve()
    if Path(installation.shipped_configs()) not in source.parents:
        # common/data/ would hide a user's data.py
        make_importable(source.parent)
    public, problems = {}, []
    for name, value in _run(source).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (dict, DictConfig, ListConfig)) or (
            name in SCHEDULES and isinstance(value, list)
        ):
            public[name] = to_nodes(value)
        elif name in SECTIONS and not (name in LAZY_SECTIONS and value is None):
            right = (
                "LazyCall(Target)(argument=value)"
                if name in LAZY_SECTIONS
                else f'defaults("{name}")'
            )
            problems.append(
                f"{shown(path)}: {name} is {' '.join(repr(value).split()):.60}, not a config "
                f"section. Write {name} = {right}, or rename the variable."
            )
        elif (
            isinstance(value, (int, float, str))
            and (hint := meant(name))
            and _is_unused(name, source)
        ):
            problems.append(f"{shown(path)}: {name}={value!r} has no effect.{hint}")
    if problems:
        raise ConfigError(problems)
    if (
        "model" in public
    ):  # a complete config: add missing sections, so that `config.graph.enabled = True` works
        for section in TYPED_SECTIONS:
            public.setdefault(section, defaults(section))  # type: ignore[arg-type]
    return OmegaConf.create(copy_config(public), flags=OBJECTS)


def _is_unused(name: str, source: Path) -> bool:
    """Return True if `name` occurs only once in the file, so it is not a helper variable that is
    used later.
    """
    return len(re.findall(rf"\b{name}\b", source.read_text(encoding="utf-8"))) == 1


class _ConfigFile(SourceFileLoader):
    """Execute a config file and turn its dicts into configs, so that `train.train_iter = 5` works
    as in LiBai.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the file, because cached bytecode could be stale after two edits in the same
        second.
        """
        try:
            return self.source_to_code(self.get_data(self.path).decode("utf-8-sig"), self.path)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{shown(self.path)}: {_not_utf8(error)}") from error

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the file.

        Also register it under its regular module name, which gives its classes an import path.
        """
        name = CONFIG_PACKAGE.sub("", module.__name__)
        file = f"{name.replace('.', '/')}.py"
        if any(os.path.join(folder, file) == self.path for folder in sys.path):
            sys.modules.setdefault(name, module)
            parent, _, last = name.rpartition(".")
            if parent:  # as an import does, to make the target `sub.helper.Thing` findable
                with contextlib.suppress(
                    ImportError
                ):  # another package with that name was imported earlier
                    setattr(importlib.import_module(parent), last, sys.modules[name])
        vars(module).setdefault("__builtins__", CONFIG_BUILTINS)
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            is_public = not name.startswith("_") and CONFIG_PACKAGE.match(module.__name__)
            if isinstance(value, dict) and (is_public or name in SECTIONS):
                with contextlib.suppress(
                    OmegaConfBaseException
                ):  # unsupported keys, such as tuples: keep the dict
                    setattr(module, name, OmegaConf.create(to_nodes(value), flags=OBJECTS))


class _Finder:
    """Find the files of one load. The finder is on `sys.meta_path` during the load."""

    def __init__(self, path: Path):
        self.path = path
        self.package = f"_config_{next(_loads)}"
        #: package of the file's folder; each parent folder has its own package, so that `from ..x
        #: import y` works
        folder = ".".join([self.package, *["up" for _ in path.parents[1:]]])
        self.name = f"{folder}.{path.stem.replace('.', '-')}"
        #: files that were executed as config files
        self.files = [str(path)]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name == self.name:
            return importlib.util.spec_from_file_location(
                name, self.path, loader=_ConfigFile(name, str(self.path))
            )
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return spec
        top = name.partition(".")[0]
        is_config = top in (self.package, "configs")
        if is_config:
            self.files.append(spec.origin)
        places = (Path(spec.origin).with_suffix(""), *Path(spec.origin).parents)
        if is_config or (top != "libai" and self.path.parent / top in places):
            spec.loader = _ConfigFile(name, spec.origin)
        return spec


def _run(path: Path) -> dict[str, Any]:
    """Execute a config file and return its namespace."""
    finder = _Finder(path)
    package = finder.package
    for folder in reversed(path.parents):
        _add_package(package, [folder])
        package += ".up"
    hidden = {name: module for name, module in sys.modules.items() if _holds_config(name, module)}
    for name in hidden:
        del sys.modules[name]
    # For `from configs.common.train import train`, search the nearest `configs` folder first and
    # libai's last.
    homes = [*path.parents, *map(Path, sys.path), Path(installation.shipped_configs()).parent]
    _add_package("configs", [home / "configs" for home in homes])
    # A config file may load another. The finder of the inner load must come before the finder of
    # the outer one.
    is_path_finder = [other is PathFinder or isinstance(other, _Finder) for other in sys.meta_path]
    sys.meta_path.insert(is_path_finder.index(True), finder)
    try:
        return vars(importlib.import_module(finder.name))
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and isinstance(error, UserError):
            raise  # concerns the environment, not the file
        raise ConfigError(_explain(error, path, finder.files)) from error
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
            del sys.modules[name]
        for name, module in hidden.items():
            sys.modules.setdefault(name, module)


def _add_package(name: str, folders: list[Path]) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder) for folder in folders if folder.is_dir()]
    sys.modules[name] = package


def _holds_config(name: str, module: types.ModuleType) -> bool:
    """Return True if a module contains config sections and must therefore be executed again by a
    load.
    """
    names = getattr(module, "__dict__", {})
    holds_section = any(isinstance(names.get(section), DictConfig) for section in SECTIONS)
    is_kept = name == "__main__" or CONFIG_PACKAGE.match(name)
    return name.partition(".")[0] == "configs" or (holds_section and not is_kept)


def make_importable(folder: Path) -> None:
    """Put `folder` on `sys.path`, and unload modules of the same names from other config
    folders.
    """
    if folder in _import_folders:
        _import_folders.remove(folder)
    for name in list(sys.modules):
        top = name.partition(".")[0]
        is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if is_here and top != "libai" and import_folder_of(name) is not None:
            del sys.modules[name]
    _import_folders.append(folder)
    installation.make_importable(str(folder))
    importlib.invalidate_caches()


def import_folder_of(module_name: str) -> Path | None:
    """Return the config folder from which the top-level module of `module_name` was imported, or
    None.
    """
    module = sys.modules.get(module_name.partition(".")[0])
    origins = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    parents = {parent for origin in origins if origin for parent in Path(origin).parents}
    return next((folder for folder in _import_folders if folder in parents), None)


def shown(path: Path | str) -> str:
    """Return `path` for a message. It is relative if it is below the working directory."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path)


def _load_yaml(path: Path, trust: bool) -> DictConfig:
    reason = ""
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{shown(path)}{line}: {getattr(error, 'problem', None) or error}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: {_not_utf8(error)}") from error
    except (
        OSError,
        OmegaConfBaseException,
    ) as error:  # OmegaConf raises OSError for a file with only a number
        config, reason = None, f" ({error})"
    if not isinstance(config, DictConfig) or (
        config and not any(name in config for name in SECTIONS)
    ):
        raise ConfigError(
            f"{shown(path)}: expected sections such as `train:`{reason}. A config here is a "
            "Python file with model, optim, dataloader and train (configs/mlp_digits.py is one), "
            "or the config.yaml that a run has saved."
        )
    config._set_flag("allow_objects", True)
    folders = [Path(folder) for folder in config.pop(IMPORT_FROM, None) or []]
    folders = [folder for folder in folders if folder.is_dir()]
    if not trust:
        refuse_other_owners(path, folders)
    for folder in reversed(folders):
        make_importable(folder)
    remember_files(config.pop(TORCH_FILES, None) or [])
    return config


def _not_utf8(reason: object) -> str:
    return f"not UTF-8 text ({reason}). Save the file as UTF-8."


def _explain(error: BaseException, path: Path, files: Sequence[str]) -> str:
    """Return `file:line: message` with the line of the config, and also the place of an error
    raised elsewhere.
    """
    if isinstance(error, SyntaxError) and error.filename:
        line = f"\n    {error.text.strip()}" if error.text else ""
        return f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}.{line}"
    text = re.sub(CONFIG_PACKAGE.pattern.removeprefix("^"), ".", str(error)) or "no message"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != torch_files.__file__  # it imports for the file
    ]
    inside = [frame for frame in frames if frame.filename in files]
    if not inside:
        return (
            text
            if isinstance(error, UserError)
            else f"{shown(path)}: {type(error).__name__}: {text}."
        )
    last, rose = inside[-1], frames[-1]
    what = (
        text if isinstance(error, UserError) else f"{type(error).__name__}: {text}.{_hint(error)}"
    )
    line = f"\n    {last.line}"
    if isinstance(error, ImportError) and "partially initialized" in text:
        name = Path(str(error.path)).name
        what = (
            f"{name} imports itself through a file that it imports. Move the shared part to a "
            "third file."
        )
    elif rose is not last and not isinstance(error, UserError) and "importlib" not in rose.filename:
        line += f"\n    raised at {shown(rose.filename)}:{rose.lineno} in {rose.name}"
    return f"{shown(last.filename)}:{last.lineno}: {what}{line}"


def _hint(error: BaseException) -> str:
    """Suggest the nearest name for a misspelt variable or attribute, or the migration page for an
    import from LiBai.
    """
    name = str(getattr(error, "name", ""))
    if isinstance(error, ImportError) and name.partition(".")[0] == "libai":
        page = installation.docs_page("migrate/from_libai.md")
        return f" If it is LiBai's, {page} has its replacement."
    if isinstance(error, NameError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return did_you_mean(name, {**frame.f_globals, **frame.f_locals})
    return did_you_mean(name, dir(error.obj)) if isinstance(error, AttributeError) else ""
