"""Run config files: plain Python whose relative imports are config files too, or YAML that a run has saved.

Each load runs its files in a package of its own, under a name that is new, so that Python's own imports execute them
anew and no edit of one config reaches another.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config.instantiation import CONFIG_PACKAGE, TARGET
from libai.config.settings.coercion import OBJECTS, copy_config, to_nodes
from libai.config.settings.errors import ConfigError, did_you_mean
from libai.config.settings.other_names import is_foreign, meant
from libai.config.settings.schema import LAZY_SECTIONS, SCHEDULES, SECTIONS
from libai.launch.installation import shipped_config, shipped_configs
from libai.launch.request import is_file
from libai.utils.errors import UserError
from libai.utils.rank_notes import START_VARIABLE

IMPORT_FROM = "_import_from_"
"""Key of a saved config: the folders in which the modules of its targets were found."""

_import_folders: list[Path] = []
_loads = itertools.count()


def _now(form: str) -> str:
    """`${now:%Y-%m-%d_%H-%M-%S}`, as in Hydra: the local time at which the job began, the same for all its ranks."""
    return time.strftime(form, time.localtime(float(os.environ.get(START_VARIABLE) or time.time())))


OmegaConf.register_new_resolver("now", _now, replace=True)


def load(path: str | Path) -> DictConfig:
    """Load a `.py` config (its public dicts and LazyCalls), a saved `.yaml`, or a shipped config by its name alone.

    The file's folder becomes importable and stays so. Raises `ConfigError` with file and line for whatever goes
    wrong in the file.
    """
    path = Path(path)
    if not is_file(path):
        shipped = shipped_config(str(path))
        if shipped is None:
            raise ConfigError(_missing(path))
        path = Path(shipped)
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path)
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no config file: expected a .py or a .yaml file.")
    namespace = _run(path.resolve())
    if problems := [*_misplaced(path, namespace), *_unread_names(path, namespace)]:
        raise ConfigError(problems)
    public = {
        name: to_nodes(value)
        for name, value in namespace.items()
        if isinstance(value, _types_of(name)) and not name.startswith("_")
    }
    return OmegaConf.create(copy_config(public), flags=OBJECTS)


class _ConfigFile(SourceFileLoader):
    """Executes a config file and makes configs of its dicts: `train.train_iter = 5` works, as in LiBai."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the file: bytecode kept from before could be that of an edit in the same second."""
        try:
            return self.source_to_code(self.get_data(self.path).decode(), self.path)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{shown(self.path)}: {_not_utf8(error)}") from error

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the file, also as the module by whose name `import` finds it, so that its classes have a path."""
        is_config_file = bool(CONFIG_PACKAGE.match(module.__name__))
        name = CONFIG_PACKAGE.sub("", module.__name__)
        if is_config_file and _origin(name) == self.path:
            sys.modules.setdefault(name, module)
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and (is_config_file or name in SECTIONS):
                setattr(module, name, _as_config(value))


class _Finder:
    """Finds the files of one load; on `sys.meta_path` while it lasts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.package = f"_config_{next(_loads)}"
        #: the package of the file's folder; the folders above have one each, so that `from ..x import y` finds its file
        folder = ".".join([self.package, *["up" for _ in path.parents[1:]]])
        self.name = f"{folder}.{path.stem.replace('.', '-')}"
        #: the files that were executed as config files
        self.files: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name == self.name:
            self.files.append(str(self.path))
            return importlib.util.spec_from_file_location(name, self.path, loader=_ConfigFile(name, str(self.path)))
        spec = PathFinder.find_spec(name, path, target)
        top = name.partition(".")[0]
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return spec
        if top in (self.package, "configs"):
            self.files.append(spec.origin)
            spec.loader = _ConfigFile(name, spec.origin)
        elif self.path.parent / top in (Path(spec.origin).with_suffix(""), *Path(spec.origin).parents):
            spec.loader = _ConfigFile(name, spec.origin)
        return spec


def _run(path: Path) -> dict[str, Any]:
    """Execute a config file and return its namespace."""
    make_importable(path.parent)
    finder = _Finder(path)
    package = finder.package
    for folder in reversed(path.parents):
        _add_package(package, [folder])
        package += ".up"
    hidden = {name: module for name, module in sys.modules.items() if _is_config_module(name, module)}
    for name in hidden:
        del sys.modules[name]
    # `from configs.common.train import train`: the nearest folder `configs`, and at last ours
    above = PathFinder.find_spec("configs")
    others = [Path(other) for other in (above and above.submodule_search_locations) or []]
    _add_package("configs", [*(folder / "configs" for folder in path.parents), *others, Path(shipped_configs())])
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        return vars(importlib.import_module(finder.name))
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and isinstance(error, UserError):
            raise  # about the environment, and not about the file
        raise ConfigError(_explain(error, path, finder.files)) from error
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
            del sys.modules[name]
        for name, other in hidden.items():
            sys.modules.setdefault(name, other)


def _add_package(name: str, folders: list[Path]) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder) for folder in folders if folder.is_dir()]
    sys.modules[name] = package


def _is_config_module(name: str, module: Any) -> bool:
    """Return True for a module that holds sections, which a load must execute anew."""
    names = vars(module) if isinstance(module, types.ModuleType) else {}
    holds_sections = any(isinstance(names.get(section), DictConfig) for section in SECTIONS)
    is_ours = name == "__main__" or CONFIG_PACKAGE.match(name)
    return name.partition(".")[0] == "configs" or (holds_sections and not is_ours)


def _as_config(value: Any) -> Any:
    """Return a dict as a config; what no config can hold (keys that are tuples, say) stays a dict."""
    if not isinstance(value, dict):
        return value
    try:
        return OmegaConf.create(to_nodes(value), flags=OBJECTS)
    except OmegaConfBaseException:
        return value


def _origin(module_name: str) -> str | None:
    """Return the file that `import module_name` would run."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError, AttributeError):
        return None
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else None


def _types_of(name: str) -> tuple[type, ...]:
    """Return what a variable of a config file may be to become a section."""
    return (dict, DictConfig, ListConfig, *([list] if name in SCHEDULES else []))


def _misplaced(path: Path, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is found where a section belongs: a number, a class, a module of that name."""
    for name in SECTIONS:
        value = namespace.get(name)
        may_be_null = name in LAZY_SECTIONS and value is None
        if name not in namespace or may_be_null or isinstance(value, _types_of(name)):
            continue
        found = f"a built {type(value).__name__}"
        if isinstance(value, (type, types.ModuleType)):
            found = f"the {'class' if isinstance(value, type) else 'module'} {value.__name__}"
        elif isinstance(value, (int, float, str, list, type(None))):
            found = f"{value!r:.60}"
        right = f'defaults("{name}")' if name not in LAZY_SECTIONS else "LazyCall(Target)(argument=value)"
        yield (
            f"{shown(path)}: {name} is {found}, not a section of the config. Write {name} = {right}, or rename the "
            "variable."
        )


def _unread_names(path: Path, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield plain values with the name that others give to a setting, which nothing in the file reads: `lr = 0.1`."""
    suspects = {name for name, value in namespace.items() if is_foreign(name) and isinstance(value, (int, float, str))}
    if not suspects:
        return
    names = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)]
    unread = suspects - {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for name, line in {node.id: node.lineno for node in reversed(names) if node.id in unread}.items():
        yield f"{shown(path)}:{line}: {name}={namespace[name]!r} sets nothing.{meant(name)}"


def make_importable(folder: Path) -> None:
    """Put `folder` first on `sys.path`, and forget modules of the same names that other config folders brought."""
    if folder in _import_folders:
        _import_folders.remove(folder)
        sys.path.remove(str(folder))
    elif str(folder) in sys.path:
        return
    for name in list(sys.modules):
        top = name.partition(".")[0]
        is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if is_here and top != "libai" and import_folder_of(name) is not None:
            del sys.modules[name]
    _import_folders.append(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def import_folder_of(module_name: str) -> Path | None:
    """Return the config folder from which the top-level module of `module_name` was imported, or None."""
    module = sys.modules.get(module_name.partition(".")[0])
    origins = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    found = [Path(origin) for origin in origins if origin]
    return next((folder for folder in _import_folders if any(folder in path.parents for path in found)), None)


def shown(path: Path | str) -> str:
    """Return `path` for a message: relative when it is below the working directory."""
    path = Path(path)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _load_yaml(path: Path) -> DictConfig:
    try:
        config: Any = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{shown(path)}{line}: {getattr(error, 'problem', None) or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: {_not_utf8(error)}") from error
    except (OSError, OmegaConfBaseException) as error:
        # an OSError without a reason is OmegaConf's own, for a file that holds a bare number
        is_bare = isinstance(error, OSError) and not error.strerror
        what = "expected sections such as `train:`, found a bare value." if is_bare else error
        raise ConfigError(f"{shown(path)}: {what}") from error
    problem = ""
    if not isinstance(config, DictConfig):
        problem = "expected sections such as `train:`, found a list."
    elif hydra := [str(name) for name in config if name in ("defaults", "hydra")]:
        problem = f"`{hydra[0]}:` is Hydra's, which does not start runs here."
    elif not any(TARGET in str(config._get_node(name)) for name in LAZY_SECTIONS if name in config):
        strange = [f"`{name!s}:`" for name in config if name not in (*SECTIONS, IMPORT_FROM)]
        problem = f"it holds {', '.join(strange[:4])}, and no section with a {TARGET}." if strange else ""
    if problem:
        raise ConfigError(
            f"{shown(path)}: {problem} A config here is a Python file with model, optim, dataloader and train "
            "(configs/mlp_digits.py is an example), or the config.yaml that a run has saved."
        )
    config._set_flag("allow_objects", True)
    for folder in reversed(config.pop(IMPORT_FROM, None) or []):
        if Path(folder).is_dir():
            make_importable(Path(folder))
    return config


def _missing(path: Path) -> str:
    if len(path.name) > 255 or "\0" in str(path):
        return f"{str(path)[:80]}... cannot be opened. Name a config file."
    if path.is_dir():
        return f"{path} is a folder: expected a .py or .yaml file in it."
    beside = path.parent
    if not beside.is_dir():
        close = did_you_mean(beside.name, [folder.name for folder in beside.parent.glob("*/")])
        return f"{shown(path)} does not exist, and neither does the folder {shown(beside)}.{close}"
    there = [file.name for file in beside.iterdir() if file.suffix in (".py", ".yaml")]
    if str(path).isidentifier():
        there += [file.stem for file in Path(shipped_configs()).glob("*.py")]
    return f"{shown(path)} does not exist.{did_you_mean(path.name, there)}"


def _not_utf8(reason: object) -> str:
    return f"not UTF-8 text ({reason}). Save the file as UTF-8."


def _explain(error: BaseException, path: Path, files: Sequence[str]) -> str:
    """Return `file:line: what`, with the line of the config and, when the error rose elsewhere, that place."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename in files]
    where, line = (
        (f"{shown(inside[-1].filename)}:{inside[-1].lineno}", f"\n    {inside[-1].line}")
        if inside
        else (shown(path), "")
    )
    text = re.sub(CONFIG_PACKAGE.pattern.removeprefix("^"), ".", str(error))
    if isinstance(error, SyntaxError) and error.filename:
        line = f"\n    {error.text.strip()}" if error.text else ""
        return f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}.{line}"
    if isinstance(error, ImportError) and "partially initialized" in text:
        return (
            f"{where}: {Path(str(error.path)).name} imports itself, by way of the modules that it imports. Move what "
            f"both need to a third file.{line}"
        )
    if missing := _missing_file(error):
        return f"{where}: {_missing(missing)}{line}"
    rose = frames[-1]
    is_elsewhere = bool(inside) and rose is not inside[-1] and not isinstance(error, UserError)
    if is_elsewhere and "importlib" not in rose.filename:
        line += f"\n    raised at {shown(rose.filename)}:{rose.lineno} in {rose.name}"
    if isinstance(error, UserError) and not inside:
        return text
    what = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}.{_hint(error, path.parent)}"
    return f"{where}: {what}{line}"


def _missing_file(error: BaseException) -> Path | None:
    """Return the config file that a relative import did not find."""
    if not isinstance(error, ModuleNotFoundError) and "unknown location" not in str(error):
        return None
    name = str(getattr(error, "name", ""))
    if found := re.search(r"cannot import name '(\w+)'.*unknown location", str(error)):
        name = f"{name}.{found[1]}"
    package, _, last = name.rpartition(".")
    folders = list(getattr(sys.modules.get(package), "__path__", []))
    is_config = CONFIG_PACKAGE.match(name) or name.startswith("configs.")
    return Path(folders[0], f"{last}.py") if is_config and folders else None


def _hint(error: BaseException, folder: Path) -> str:
    """Suggest the nearest name for the errors that come from a misspelt one."""
    name, owner = str(getattr(error, "name", "")), getattr(error, "obj", None)
    if isinstance(error, NameError):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return did_you_mean(name, [*trace.tb_frame.f_globals, *trace.tb_frame.f_locals] if trace is not None else [])
    if isinstance(error, ModuleNotFoundError):
        return did_you_mean(name, [file.stem for file in folder.glob("*.py")])
    if isinstance(error, ImportError) and (found := re.search(r"cannot import name '(\w+)'", str(error))):
        return did_you_mean(found[1], dir(sys.modules.get(name)))
    if found := re.match(r"'dict' object has no attribute '(\w+)'", str(error)):
        return f' A dict made in this file has keys, no attributes (an imported one has both): write ["{found[1]}"].'
    return did_you_mean(name, dir(owner)) if isinstance(error, AttributeError) and owner is not None else ""
