"""Require that the ranks of a job were started alike, before they train: config, code, versions,
data and output folder.

Every rank evaluates the config and reads the code and the data of its own machine. A seed, a period
or a corpus that differs on one of them would train something else or let the ranks wait for one
another.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

import libai
from libai.checkpoint.manifest import STATE
from libai.config import RunConfig
from libai.data.batches import BatchReader
from libai.forward.python_state import is_users
from libai.native.kernels import kernels_in_use
from libai.utils.atomic import read_json
from libai.utils.distributed import any_rank, broadcast_object, gather_objects, get_world_size
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import local_ranks
from libai.utils.seeding import generators_kept

#: settings that may differ, because the value of rank 0 is used
_OF_RANK_0 = ("train.output_dir",)
#: number of samples of a dataset that are compared
_NUM_SAMPLES = 8
#: number of hexadecimal digits of a digest
_DIGITS = 12
#: maximum number of differences in an error
_MOST_SHOWN = 8
#: seconds that a shared file system may take to show a new file
_PATIENCE = 3.0


def require_same_start(config: RunConfig) -> None:
    """Raise `UserError` on every rank if a rank has another config, other code or other versions.

    Absolute paths may differ between machines: `require_same_data` compares what is there.
    Collective.
    """
    if get_world_size() > 1:
        settings = {
            name: value for name, value in _leaves(config.to_config(), "") if name not in _OF_RANK_0
        }
        remedy = (
            "Start all ranks with the same config, code and versions. Every rank evaluates the "
            "config by itself, so a number that it draws differs: pass such a number on the "
            "command line, or leave train.seed=null, which draws one seed for all"
        )
        _require_same({**settings, **_versions(), **_sources()}, remedy)


def require_same_data(loaders: Mapping[str, Any]) -> None:
    """Raise `UserError` on every rank if a dataset has other samples on some rank.

    `loaders`: name → loader. Compares the lengths of the datasets, and a few samples that are the
    same when they are read twice. Collective.
    """
    if get_world_size() > 1:
        found = {name: _describe_data(loader) for name, loader in loaders.items()}
        remedy = "Give all ranks the same data. The loader divides it among them"
        _require_same({name: text for name, text in found.items() if text}, remedy)


def require_same_checkpoint(path: Path | None) -> None:
    """Raise `UserError` on every rank if a rank does not see the checkpoint that rank 0 resumes.

    Collective.
    """
    if path is None or get_world_size() == 1:
        return
    file = path / STATE
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
    if any_rank(digest != broadcast_object(digest)):
        raise UserError(
            f"rank 0 resumes {path}, but not every machine sees that checkpoint. {_SHARE}"
        )


_SHARE = (
    "Set train.output_dir to a folder of a file system that all machines share, or copy the folder "
    "to the same path on every machine before --resume."
)


def warn_of_own_folders(file: Path, run_id: str) -> None:
    """Log a warning if some rank does not see `file`, in which rank 0 has written `run_id`.

    Collective.
    """
    if get_world_size() == local_ranks():
        return
    end = time.monotonic() + _PATIENCE
    while read_json(file).get("run_id") != run_id and time.monotonic() < end:
        time.sleep(0.1)
    if any_rank(read_json(file).get("run_id") != run_id):
        logger.warning(
            "the machines do not share the folder %s: no machine could resume this run. %s",
            file.parent,
            _SHARE,
        )


def _require_same(facts: Mapping[str, Any], remedy: str) -> None:
    """Raise `UserError` on every rank if `facts` differ. Collective."""
    mine = {name: str(value) for name, value in facts.items()}
    ranks = gather_objects({"host": platform.node(), "facts": mine})
    differences = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["facts"]):
        values = [rank["facts"].get(name, "missing") for rank in ranks]
        if name.startswith(_CODE) and "missing" in values:
            continue  # a rank may import a module later than the others
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            hosts = (ranks[0]["host"], ranks[odd]["host"])
            first, other = (f" ({host})" if hosts[0] != hosts[1] else "" for host in hosts)
            differences.append(
                f"{name} is {values[0]} on rank 0{first} and {values[odd]} on rank {odd}{other}"
            )
    if differences:
        left = len(differences) - _MOST_SHOWN
        more = f", and {left} more" if left > 0 else ""
        text = "; ".join(differences[:_MOST_SHOWN])
        raise UserError(f"the ranks of this job differ: {text}{more}. {remedy}.")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting in a config; an object of the user is named by its
    class.
    """
    if hasattr(value, "items"):
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}".lstrip("."))
    elif isinstance(value, str | int | float | None):
        is_path = isinstance(value, str) and Path(value).is_absolute()
        yield name, "an absolute path" if is_path else value
    elif hasattr(value, "__iter__") and hasattr(value, "__len__"):
        for index, one in enumerate(value):
            yield from _leaves(one, f"{name}[{index}]")
    else:
        yield name, f"a {type(value).__name__}"


def _versions() -> dict[str, Any]:
    return {
        "the version of libai": libai.__version__,
        "the version of oneflow": flow.__version__,
        "the version of numpy": np.__version__,
        "the version of Python": platform.python_version(),
        "the instruction set of the CPU kernels": kernels_in_use(),
    }


_CODE = "the code of "


def _sources() -> dict[str, str]:
    """Return the digests of libai and of the user's modules."""
    found = {}
    own = sorted(Path(libai.__file__).parent.rglob("*.py"))
    found[f"{_CODE}libai"] = _digest(*own)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if is_users(name) and file and file.endswith(".py"):
            found[_CODE + name] = _digest(Path(file))
    return found


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _describe_data(loader: Any) -> str:
    """Return the length and a digest of samples of a loader's dataset, or "" if it has none."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__"):
        return ""
    size = len(dataset)
    reader = BatchReader(dataset, collate=getattr(loader, "collate", None))
    indices = np.linspace(0, size - 1, min(size, _NUM_SAMPLES)).astype(np.int64)
    text = f"{size} samples"
    digests = set()
    with generators_kept():
        for _ in range(2):
            try:
                batches = [reader.read(np.array([index])) for index in indices]
            except Exception:  # the run will report an error of the user's dataset with its place
                return text
            digests.add(_digest_of_arrays(batches))
    return f"{text} with the digest {digests.pop()}" if len(digests) == 1 else text


def _digest_of_arrays(batches: Iterable[Mapping[str, np.ndarray]]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for name, array in sorted(batch.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:_DIGITS]
