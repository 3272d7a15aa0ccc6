"""Read the tensors of a file of `torch.save` (`.pt`, `.pth`) without PyTorch and without running
what its pickle describes.

Instructions outside of `_CODES` and names outside of `_ALLOWED` are refused. No allowed function
copies its arguments, so the memory grows with the file only.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.reader import TensorGroup
from libai.checkpoint.tensor_files import CODES, TensorSpec, widened

#: instructions of pickles that dicts of tensors and numbers need, as in the module `pickle`
_CODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS SETITEM "
    "SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BINPERSID"
)


class _Tensor(NamedTuple):
    """Elements of the storage `key`, which begin at `offset` and are `strides` apart."""

    key: str
    spec: TensorSpec
    offset: int
    strides: tuple[int, ...]


class TorchTensors(TensorGroup):
    """The tensors of a file of `torch.save`, by their path in its nested dicts."""


def open_torch(path: Path) -> TorchTensors:
    """Open the tensors of `path`. Raises `CheckpointError` for anything but tensors and values."""
    with _reading(path):
        archive = zipfile.ZipFile(path)
        file_bytes = path.stat().st_size
        sizes = {}
        for info in archive.infolist():
            if info.compress_type or not info.compress_size == info.file_size <= file_bytes:
                raise ValueError("its members are compressed or have wrong sizes")
            sizes[info.filename] = info.file_size
        [pickled] = [name for name in sizes if name.endswith("/data.pkl")]
        folder = pickled.removesuffix("data.pkl")
        if sizes[pickled] > 2**26 or sizes.get(f"{folder}byteorder", 6) != len("little"):
            raise ValueError("its data.pkl is larger than 64 MiB, or its numbers are big-endian")
        with archive.open(pickled) as file:
            found = dict(_tensors(_Reader(file).load()))
        for name, (key, spec, offset, strides) in found.items():
            last = offset + sum((size - 1) * stride for size, stride in zip(spec.shape, strides))
            needed = (last + 1) * spec.raw_dtype.itemsize
            # a missing storage has no bytes
            if (
                spec.num_bytes and needed > sizes.get(f"{folder}data/{key}", 0)
            ) or spec.num_bytes > file_bytes:
                raise ValueError(f"{name!r} lies outside of its data")

    def fetch(name: str) -> np.ndarray:
        key, spec, offset, strides = found[name]
        dtype = spec.raw_dtype
        with _reading(path):
            steps = [stride * dtype.itemsize for stride in strides]
            data = archive.read(f"{folder}data/{key}")
            array: np.ndarray = np.ndarray(spec.shape, dtype, data, offset * dtype.itemsize, steps)
        return widened(array) if spec.dtype == "bfloat16" else array.copy()

    return TorchTensors(path, {name: tensor.spec for name, tensor in found.items()}, fetch)


def without_wrappers(names: dict[str, str], targets: set[str]) -> dict[str, str]:
    """Return name in the model -> name on disk, for the prefixes with which most names match.

    PyTorch programs save a `state_dict` alone or as an item of a dict (`model.`), possibly of a
    wrapper (`module.`). A `TorchTask` has the prefix `module.`. If two items match, such as `model`
    and `ema`, the names stay, and `revise_keys` chooses.

    >>> names = {name: name for name in ["model.a", "model.b", "step"]}
    >>> without_wrappers(names, {"module.a", "module.b"})
    {'module.a': 'model.a', 'module.b': 'model.b'}
    """
    own = "module." if all(target.startswith("module.") for target in targets) else ""
    matches: Counter[str] = Counter()
    for name in names:
        for part in re.finditer(r"^|(?<=\.)", name):
            if own + name[part.start() :] in targets:
                matches[name[: part.start()]] += 1
    most = max(matches.values(), default=0)
    best = [prefix for prefix in matches if matches[prefix] == most]
    if len(best) != 1:
        return names
    [prefix] = best
    return {
        own + new.removeprefix(prefix): old for new, old in names.items() if new.startswith(prefix)
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can raise any error
        raise CheckpointError(
            f"{path} was written by torch.save, but it is damaged or not a dict of tensors of "
            f"PyTorch 1.6 or newer ({type(error).__name__}: {str(error)[:200]}). libai runs no "
            "code of such a file. In PyTorch, save only model.state_dict() in it."
        ) from None


def _tensors(saved: Any) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors in nested dicts, and empty these: a pickle may name one dict often, or in
    itself.
    """
    waiting = [("", saved)]
    while waiting:
        prefix, value = waiting.pop()
        if len(prefix) > 500:
            raise ValueError("a name has more than 500 characters")
        if isinstance(value, _Tensor):
            yield prefix[:-1], value
        elif isinstance(value, _Dict):
            waiting += [(f"{prefix}{key}.", item) for key, item in value.items()]
            value.clear()


class _Dict(dict[Any, Any]):
    """A dict whose keys are cheap to hash: shared tuples in tuples can take forever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, (str, int)):
            raise ValueError("a key of a dict is neither a text nor an integer")
        super().__setitem__(key, value)


class _Reader(pickle._Unpickler):
    """Python's own implementation, whose memory grows only with the file."""

    def find_class(self, module: str, name: str) -> Any:
        """Return our value for an allowed name. Raises `KeyError` for others."""
        return _ALLOWED[f"{module}.{name}"]

    def persistent_load(self, saved: Any) -> Any:
        """Return the description of a storage."""
        return saved

    def push_dict(self) -> None:
        """Push an empty dict."""
        self.append(_Dict())  # type: ignore[attr-defined]

    dispatch = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _CODES.split())
    }
    dispatch[pickle.EMPTY_DICT[0]] = push_dict  # type: ignore[assignment]
    # the attributes of an object, such as `_metadata` of a `state_dict`, are ignored
    dispatch[pickle.BUILD[0]] = pickle._Unpickler.load_pop  # type: ignore[attr-defined]


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    """Return the tensor that `torch._utils._rebuild_tensor_v2` would return."""
    kind, dtype, key, *_ = storage
    if (
        kind != "storage"
        or dtype not in CODES
        or not isinstance(key, str)
        or not len(shape) == len(strides) <= 32  # limit of numpy 1.x
        or not all(type(size) is int and size >= 0 for size in (offset, *shape, *strides))
    ):
        raise ValueError("a tensor has a wrong storage, shape, stride or offset")
    return _Tensor(key, TensorSpec(dtype, tuple(shape)), offset, tuple(strides))


def _empty() -> _Dict:
    return _Dict()


def _first(value: Any, *_: Any) -> Any:
    return value


_ALLOWED = {
    "collections.OrderedDict": _empty,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_parameter": _first,
    "torch.Size": _first,
    "torch.device": _first,
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
