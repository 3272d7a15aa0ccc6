"""Import a user's PyTorch files unchanged: in these files, and only there, `torch` is OneFlow.

A file that is imported inside `torch_files()` gets an `__import__` function of its own. Nothing is
added to `sys.modules`, so other libraries, a real PyTorch in the same process and
`importlib.util.find_spec("torch")` are not affected, and an import inside a function works later.

`libai.torch_names` has the names that OneFlow 0.9.0 lacks or defines differently. It is imported,
with oneflow, when the first of these files asks for torch.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from libai.config.instantiation import CONFIG_PACKAGE
from libai.utils.errors import UserError

_LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib"))
#: libraries with a module for each framework
_ALIASES = {"einops.layers.torch": "einops.layers.oneflow"}
#: set in an interpreter with PyTorch: torch is PyTorch there (`libai.torch_names.proof`)
REAL_TORCH = "LIBAI_REAL_TORCH"


class TorchNameError(UserError, AttributeError):
    """A PyTorch file uses a name that OneFlow 0.9.0 has no counterpart for."""


class _TorchImportError(UserError, ImportError):
    """A PyTorch file imports a name that OneFlow 0.9.0 has no counterpart for."""


@contextmanager
def torch_files(*packages: str) -> Iterator[None]:
    """Import PyTorch files in this block: `with torch_files(): from model import GPT`.

    In the files that are imported inside, and in files that these import, `torch` is OneFlow.
    Installed packages are left alone, except `packages`, such as `torch_files("vit_pytorch")`.
    """
    remember_files(packages)
    _FINDER.num_blocks += 1
    try:
        yield
    finally:
        _FINDER.num_blocks -= 1


def remember_files(names: Iterable[str]) -> None:
    """Show OneFlow as torch to these modules in any import, for a saved config."""
    _FINDER.named.update(names)
    if _FINDER not in sys.meta_path and REAL_TORCH not in os.environ:
        sys.meta_path.insert(0, _FINDER)


def recorded_files(targets: Iterable[str]) -> list[str]:
    """Return the modules of the dotted paths `targets` that see OneFlow as torch."""
    modules = {target.rpartition(".")[0] for target in targets}
    found = {name: getattr(sys.modules.get(name), "__builtins__", None) for name in modules}
    return sorted(name for name, names in found.items() if names is _USER_BUILTINS)


class _Finder:
    """Find modules like the finders after it, and give user files a loader that replaces torch.

    `named`: modules and packages whose files are always user files. `num_blocks`: number of blocks
    in which every file outside of libraries is one.
    """

    def __init__(self) -> None:
        self.named: set[str] = set()
        self.num_blocks = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is None:
                continue
            if isinstance(spec.loader, SourceFileLoader) and self._is_users(name, spec.loader.path):
                spec.loader = _UserFile(spec.loader)
            return spec
        return None

    def _is_users(self, name: str, file: str) -> bool:
        own = CONFIG_PACKAGE.sub("", name)
        if any(f"{own}.".startswith(f"{known}.") for known in self.named):
            return True
        is_library = file.startswith(_LIBRARIES) or own.partition(".")[0] in ("libai", "oneflow")
        return self.num_blocks > 0 and not is_library


_FINDER = _Finder()


class _UserFile(Loader):
    """Execute a user file with its own `__import__`."""

    def __init__(self, loader: SourceFileLoader):
        self._loader = loader

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the file."""
        vars(module)["__builtins__"] = _USER_BUILTINS
        self._loader.exec_module(module)


def _import_in_config(name: str, *args: Any, **options: Any) -> Any:
    """Import a module for a config file: `torch` is OneFlow inside of `torch_files()`."""
    is_torch = name.partition(".")[0] == "torch" and _FINDER.num_blocks > 0
    return (_import if is_torch else builtins.__import__)(name, *args, **options)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Import a module for a user file: `__import__` with OneFlow as torch."""
    if level or name.partition(".")[0] != "torch":
        with torch_files():
            return builtins.__import__(
                _ALIASES.get(name, name), globals, locals, fromlist or (), level
            )
    top = module = _find_module("torch")
    try:
        for part in name.split(".")[1:]:
            module = getattr(module, part)
        for part in fromlist or ():
            if part != "*":
                getattr(module, part)
    except TorchNameError as error:  # Python would replace its text by "cannot import name"
        raise _TorchImportError(str(error)) from None
    return module if fromlist else top


_USER_BUILTINS = {**vars(builtins), "__import__": _import}
#: the names of a config file, which may itself import torch in a block
CONFIG_BUILTINS = {**vars(builtins), "__import__": _import_in_config}


class _TorchModule(types.ModuleType):
    """`torch` or a module in it: first the names of `libai.torch_names`, then OneFlow's."""

    def __init__(self, name: str, real: types.ModuleType | None):
        super().__init__(name)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        table = _table()
        value = table.NAMES.get(path)
        if value is None:
            value = getattr(self._real, name, None)
            if value is None or isinstance(value, types.ModuleType):
                value = _find_module(path)
            if value is None:
                raise TorchNameError(f"{users_line()}: {path}: {table.reason_for(path)}.")
        return value  # not kept, because trainers replace functions of OneFlow for a while


def users_line() -> str:
    """Return the line of the user's file that runs, as `file:line`."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_builtins["__import__"] not in (_import, _import_in_config):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _table() -> Any:
    """Return the module with the table of names. It imports oneflow, which this file must not."""
    return importlib.import_module("libai.torch_names.names")


@functools.cache
def _find_module(path: str) -> _TorchModule | None:
    """Return the module `path` if OneFlow has it or the table has names in it, else None."""
    try:
        real = importlib.import_module(path.replace("torch", "oneflow", 1))
    except ImportError:
        real = None
    has_names = any(name.startswith(f"{path}.") for name in _table().NAMES)
    return _TorchModule(path, real) if real or has_names else None
