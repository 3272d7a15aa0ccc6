"""Run config files: plain Python whose relative imports are config files too, or YAML that a run has saved.

Every load executes the files anew and hands out copies, so that no edit of one config reaches another.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai.config.lazy.instantiation import TARGET
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
    make_importable(path.resolve().parent)
    namespace = _Loader(path).run()
    if problems := [*_misplaced(path, namespace), *_unread_names(path, namespace)]:
        raise ConfigError(problems)
    public = {
        name: to_nodes(value)
        for name, value in namespace.items()
        if isinstance(value, _types_of(name)) and not name.startswith("_")
    }
    return OmegaConf.create(copy_config(public), flags=OBJECTS)


def _types_of(name: str) -> tuple[type, ...]:
    """What a variable of a config file may be to become a section."""
    return (dict, DictConfig, ListConfig, *([list] if name in SCHEDULES else []))


def _misplaced(path: Path, namespace: Mapping[str, Any]) -> Iterator[str]:
    """What stands where a section belongs: a number, a class, a module of that name."""
    for name in SECTIONS:
        value = namespace.get(name)
        may_be_null = name in LAZY_SECTIONS and value is None
        if name not in namespace or may_be_null or isinstance(value, _types_of(name)):
            continue
        found = f"the {'module' if isinstance(value, types.ModuleType) else 'class'} {getattr(value, '__name__', '')}"
        if not isinstance(value, (type, types.ModuleType)):
            is_plain = isinstance(value, (int, float, str, list, type(None)))
            found = f"{value!r:.60}" if is_plain else f"a built {type(value).__name__}"
        right = f'{name} = defaults("{name}")'
        if name in LAZY_SECTIONS:
            right = f"{name} = LazyCall(Target)(argument=value)"
        yield f"{shown(path)}: {name} is {found}, not a section of the config. Write {right}, or rename the variable."


def _unread_names(path: Path, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Plain values with the name that others give to a setting, which nothing in the file reads: `lr = 0.1`."""
    suspects = {name for name, value in namespace.items() if is_foreign(name) and isinstance(value, (int, float, str))}
    if not suspects:
        return
    names = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for node in names:
        if node.id in suspects - read:
            suspects.discard(node.id)
            yield f"{shown(path)}:{node.lineno}: {node.id}={namespace[node.id]!r} sets nothing.{meant(node.id)}"


def make_importable(folder: Path) -> None:
    """Put `folder` first on `sys.path`, and forget modules of the same names that other config folders brought."""
    if folder in _import_folders:
        _import_folders.remove(folder)
        sys.path.remove(str(folder))
    elif str(folder) in sys.path:
        return
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if is_here and top != "libai" and _came_from_a_config_folder(module, top):
            del sys.modules[name]
    _import_folders.append(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _came_from_a_config_folder(module: types.ModuleType, top: str) -> bool:
    origin = Path(getattr(module, "__file__", None) or "/")
    return any(origin == other / f"{top}.py" or other / top in origin.parents for other in _import_folders)


def import_folder_of(module_name: str) -> Path | None:
    """The config folder from which the top-level module of `module_name` was imported, or None."""
    module = sys.modules.get(module_name.partition(".")[0])
    origins = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    found = [Path(origin).resolve() for origin in origins if origin]
    return next((folder for folder in _import_folders if any(folder in path.parents for path in found)), None)


def shown(path: Path | str) -> str:
    """`path` as a message shows it: relative when it lies below the working directory."""
    path = Path(path)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _load_yaml(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{shown(path)}{line}: {getattr(error, 'problem', None) or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: {_not_utf8(error)}") from error
    except OSError as error:
        if not error.strerror:  # OmegaConf's own, for a file that holds a bare number
            raise ConfigError(f"{shown(path)}: expected sections such as `train:`, found a bare value.") from error
        raise ConfigError(f"{shown(path)}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{shown(path)}: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{shown(path)}: expected sections such as `train:`, found a list. {_WHAT_A_CONFIG_IS}")
    if problem := _foreign_yaml(config):
        raise ConfigError(f"{shown(path)}: {problem} {_WHAT_A_CONFIG_IS}")
    config._set_flag("allow_objects", True)
    for folder in reversed(config.pop(IMPORT_FROM, None) or []):
        if Path(folder).is_dir():
            make_importable(Path(folder))
    return config


_WHAT_A_CONFIG_IS = (
    "A config here is a Python file with model, optim, dataloader and train (configs/mlp_digits.py is an example), or "
    "the config.yaml that a run has saved."
)


def _foreign_yaml(config: DictConfig) -> str:
    """What shows that no run of ours has saved this YAML, or the empty string."""
    names = [str(name) for name in config]
    hydra = [name for name in names if name in ("defaults", "hydra")]
    if hydra:
        return f"`{hydra[0]}:` is Hydra's, which does not start runs here."
    strange = [f"`{name}:`" for name in names if name not in SECTIONS]
    has_call = any(TARGET in str(config._get_node(name)) for name in LAZY_SECTIONS if name in names)
    if strange and not has_call:
        return f"it holds {', '.join(strange[:4])}, and no section with a {TARGET}."
    return ""


class _Loader:
    """One load: runs a config file and, through its relative imports, others; each file once."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._root = self._path.parent
        self._modules: dict[Path, types.ModuleType] = {}
        self._running: list[Path] = []
        self._builtins = {**vars(builtins), "__import__": self._import}

    def run(self) -> dict[str, Any]:
        """Execute the file and return its namespace."""
        try:
            return vars(self._execute(self._path))
        except (Exception, SystemExit) as error:
            if isinstance(error, ImportError) and isinstance(error, UserError):
                raise  # about the environment, and not about the file
            raise ConfigError(self._explain(error)) from error

    def _execute(self, path: Path) -> types.ModuleType:
        if path in self._modules:
            return self._modules[path]
        if path in self._running:
            raise ConfigError(
                f"{shown(path)} imports itself, by way of {shown(self._running[-1])}. Move what both need to a third "
                "file."
            )
        self._running.append(path)
        module = self._new_module(path)
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        exec(code, vars(module))
        self._running.remove(path)
        self._modules[path] = module
        return module

    def _new_module(self, path: Path) -> types.ModuleType:
        """An empty module under the name by which `import` would find the file, so that its classes have a path."""
        name = f"libai_config_{len(self._modules)}_{path.stem}"
        if self._root in path.parents:
            importable = ".".join(path.relative_to(self._root).with_suffix("").parts)
            if _origin(importable) == path:
                name = importable
        module = types.ModuleType(name)
        module.__file__ = str(path)
        vars(module)["__builtins__"] = self._builtins
        sys.modules.setdefault(name, module)
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """What `import` does inside a config file."""
        names = list(fromlist or ())
        if level:
            assert globals is not None  # an import statement always passes them
            return self._import_config(Path(globals["__file__"]).parents[level - 1], name, names, "." * level + name)
        if name.partition(".")[0] == "configs" and names:
            above = self._folder_above(name, names)
            if above is not None:
                return self._import_config(above, name, names, name)
        module = builtins.__import__(name, globals, locals, names, 0)
        holds_config = any(_is_config(item, getattr(module, item, None)) for item in names)
        return _copied(module, SECTIONS) if holds_config or "*" in names else module

    def _folder_above(self, name: str, names: list[str]) -> Path | None:
        """The folder above the `configs` that an absolute `from configs.x import y` means: near the file, or ours."""
        parts = name.split(".")
        for folder in [*self._root.parents, Path(shipped_configs()).parent]:
            base = folder.joinpath(*parts)
            if base.with_suffix(".py").is_file() or any((base / f"{item}.py").is_file() for item in names):
                return folder
        return None

    def _import_config(self, folder: Path, name: str, names: list[str], written: str) -> types.ModuleType:
        """`from .name import names`: a file, or a folder of files."""
        base = folder.joinpath(*name.split(".")) if name else folder
        if base.with_suffix(".py").is_file():
            return _as_config_file(self._execute(base.with_suffix(".py")))
        if not base.is_dir():
            raise ConfigError(f"from {written} import ...: {_missing(base.with_suffix('.py'))}")
        package = base / "__init__.py"
        module = _as_config_file(self._execute(package)) if package.is_file() else types.ModuleType(written)
        for item in names:
            if hasattr(module, item) or item == "*":
                continue
            if not (base / f"{item}.py").is_file():
                raise ConfigError(f"from {written} import {item}: {_missing(base / f'{item}.py')}")
            setattr(module, item, _as_config_file(self._execute(base / f"{item}.py")))
        return module

    def _explain(self, error: BaseException) -> str:
        """`file:line: what`, with the line of the config and, when the error rose elsewhere, that place."""
        if isinstance(error, SyntaxError) and error.filename:
            text = f"\n    {error.text.strip()}" if error.text else ""
            return f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}.{text}"
        if isinstance(error, UnicodeDecodeError) and self._running:
            return f"{shown(self._running[-1])}: {_not_utf8(error)}"
        if isinstance(error, ImportError) and str(error.path) in map(str, self._running):
            name = Path(str(error.path)).name
            return (
                f"{shown(str(error.path))} imports itself, by way of the modules that it imports ({error}). Move what "
                f"both need to a third file, or leave out the import of {name}."
            )
        frames = traceback.extract_tb(error.__traceback__)
        files = {str(path) for path in [self._path, *self._modules, *self._running]}
        inside = [frame for frame in frames if frame.filename in files]
        if not inside:
            return f"{shown(self._path)}: {type(error).__name__}: {error}"
        last = inside[-1]
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        rose = frames[-1]
        machinery = rose.filename == __file__ or "importlib" in rose.filename
        is_elsewhere = rose is not last and not isinstance(error, UserError) and not machinery
        where = f"\n    raised at {shown(rose.filename)}:{rose.lineno} in {rose.name}" if is_elsewhere else ""
        hint = _hint(error, self._root, _names(error))
        return f"{shown(last.filename)}:{last.lineno}: {what}{hint}\n    {last.line}{where}"


def _as_config_file(module: types.ModuleType) -> types.ModuleType:
    """`_copied` of a config file, whose plain dicts are configs as well."""
    return _copied(module, [name for name in vars(module) if not name.startswith("_")])


def _copied(module: types.ModuleType, sections: Sequence[str]) -> types.ModuleType:
    """A module with the same names, whose configs are copies: editing them changes nobody else's. Plain dicts that
    `sections` names come as configs, so that `train.train_iter = 5` works on them, as in detectron2 and LiBai."""
    twin = types.ModuleType(module.__name__)
    configs = (DictConfig, ListConfig, dict)
    vars(twin).update(
        {
            name: copy_config(_as_config(value) if name in sections else value)
            if isinstance(value, configs) and name != "__builtins__"
            else value
            for name, value in vars(module).items()
        }
    )
    return twin


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, (DictConfig, ListConfig)) or (name in SECTIONS and isinstance(value, dict))


def _as_config(value: Any) -> Any:
    """A dict as a config; what no config can hold (keys that are tuples, say) stays a dict."""
    if not isinstance(value, dict):
        return value
    try:
        return OmegaConf.create(to_nodes(value), flags=OBJECTS)
    except OmegaConfBaseException:
        return value


def _origin(module_name: str) -> Path | None:
    """The file that `import module_name` would run (or has run)."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError, AttributeError):
        module = sys.modules.get(module_name)
        origin = getattr(module, "__file__", None)
    else:
        origin = spec.origin if spec is not None else None
    return Path(origin).resolve() if origin else None


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8 text (byte 0x{byte:02x} at position {error.start}). Save the file as UTF-8."


def _missing(path: Path) -> str:
    if len(path.name) > 255 or "\0" in str(path):
        return (
            f"{shown(path) if len(str(path)) < 300 else f'{str(path)[:80]}...'} cannot be opened. Name a config file."
        )
    if path.is_dir():
        return f"{path} is a folder: expected a .py or .yaml file in it."
    beside = path.parent
    if not beside.is_dir():
        folders = [folder.name for folder in beside.parent.glob("*/")]
        hint = did_you_mean(beside.name, folders)
        return f"{shown(path)} does not exist, and neither does the folder {shown(beside)}.{hint}"
    there = [file.name for file in beside.iterdir() if file.suffix in (".py", ".yaml")]
    if str(path).isidentifier():
        there += [file.stem for file in Path(shipped_configs()).glob("*.py")]
    return f"{shown(path)} does not exist.{did_you_mean(path.name, there)}"


def _names(error: BaseException) -> list[str]:
    """The names that the statement which raised `error` could use."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return [*trace.tb_frame.f_globals, *trace.tb_frame.f_locals] if trace is not None else []


def _hint(error: BaseException, root: Path, names: Sequence[str]) -> str:
    """The nearest name for the errors that come from a misspelt one."""
    if isinstance(error, NameError):
        return did_you_mean(str(error.name), names)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return did_you_mean(error.name, [file.stem for file in root.glob("*.py")])
    if isinstance(error, ImportError) and (found := re.search(r"cannot import name '(\w+)'", str(error))):
        return did_you_mean(found.group(1), dir(sys.modules.get(error.name or "")))
    if isinstance(error, AttributeError) and (
        found := re.search(r"^'dict' object has no attribute '(\w+)'", str(error))
    ):
        return (
            f' A dict made in this file has keys, no attributes (an imported one has both): write ["{found.group(1)}"].'
        )
    if isinstance(error, AttributeError) and getattr(error, "obj", None) is not None:
        return did_you_mean(str(error.name), dir(error.obj))
    return ""
