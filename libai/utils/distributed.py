"""Rank and device of this process, and the few collectives that a trainer needs.

Rank facts come from the environment that `oneflow.distributed.launch` sets and cost no import of oneflow; only the
collectives import it, and only when there is more than one process. Collectives run on CPU tensors in the calling
order, so every rank must call the same ones in the same order, from one thread.

This file is not about layouts: which ranks share a model or a batch is the business of `libai.parallel.Mesh`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from libai.utils.errors import EXIT_USER_MISTAKE, UserError

logger = logging.getLogger("libai.utils")

Op = Literal["sum", "max", "min"]

_FIRST, _LAST = (6, 0), (8, 9)
#: the wheel holds machine code for sm_60 ... sm_86 and no PTX that a driver could compile; 8.9 runs the code of 8.6
_SUPPORTED = "compute capability 6.0 to 8.9 (Pascal to Ada)"
#: sent in place of a length by a rank whose object JSON cannot hold, so that the others fail with it and do not wait
_NOT_ENCODABLE = -1


def _from_launcher(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"environment variable {name}={text!r} is not a whole number, so this process does not know which rank it "
            f"is. Unset it, or start through tools/train.sh, which sets it."
        ) from None


def get_rank() -> int:
    """This process among all processes of the job, 0-based. 0 without a launcher."""
    return max(0, _from_launcher("RANK", 0))  # importing oneflow without a launcher sets RANK=-1


def get_world_size() -> int:
    """Number of processes of the job. 1 without a launcher."""
    return _from_launcher("WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return the rank on this machine, 0-based; also the index of its GPU. 0 without a launcher."""
    return _from_launcher("LOCAL_RANK", 0)


def is_main_process() -> bool:
    """True on rank 0, the one that prints and writes."""
    return get_rank() == 0


def default_device(device: str = "auto") -> str:
    """Resolve "auto", "cpu" or "cuda" to the device type of this process, "cpu" or "cuda".

    "auto" is CUDA where oneflow sees GPUs that it has machine code for, else the CPU, with a warning when there are
    GPUs that cannot be used. "cuda" raises `UserError` in that case, and both do when this machine has fewer GPUs than
    ranks.
    """
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UserError(
            f"train.device={device!r} is not a device type. Use auto, cpu or cuda; each process takes the GPU whose "
            "index is its local rank (CUDA_VISIBLE_DEVICES chooses among them)."
        )
    import oneflow as flow

    count = flow.cuda.device_count() if flow.cuda.is_available() else 0
    obstacle = _explain_no_cuda(count)
    if obstacle is not None and device == "cuda":
        raise UserError(f"train.device=cuda cannot be had: {obstacle}. Use train.device=cpu or auto.")
    if obstacle is not None:
        if count:
            logger.warning("training on the CPU: %s", obstacle)
        return "cpu"
    if get_local_rank() >= count:  # never the CPU for some ranks only: they would wait for each other forever
        raise UserError(
            f"train.device={device}: local rank {get_local_rank()} needs a GPU of its own, and this machine shows "
            f"{count}. Start at most {count} processes here, or use train.device=cpu."
        )
    return "cuda"


def prepare_device(device: str, is_eager: bool) -> None:
    """Let OneFlow compute on its scheduler thread in eager mode on CPU, unless the user has chosen otherwise.

    That thread spins while a worker computes, so ranks steal each other's cores. Graph mode would get slower. Has no
    effect after the first tensor.
    """
    if is_eager and default_device(device) == "cpu":
        os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")


def _explain_no_cuda(count: int) -> str | None:
    """Why the `count` GPUs of this machine cannot be used; None when they can. The same for all its ranks."""
    import oneflow as flow

    if not count:
        return "oneflow sees no usable GPU here (no NVIDIA driver, no device, or CUDA_VISIBLE_DEVICES hides it)"
    cuda = flow.cuda
    return explain_unsupported([(cuda.get_device_name(i), tuple(cuda.get_device_capability(i))) for i in range(count)])


def explain_unsupported(devices: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
    """Return why a GPU cannot be used, None if all of them can. `devices`: name and compute capability of each.

    >>> explain_unsupported([("A100", (8, 0))]) is None
    True
    """
    for index, (name, capability) in enumerate(devices):
        if not _FIRST <= capability <= _LAST:
            return (
                f"GPU {index} ({name}) has compute capability {'.'.join(map(str, capability))}, and OneFlow 0.9.0 has "
                f"machine code for {_SUPPORTED}. Hide it with CUDA_VISIBLE_DEVICES if others are there"
            )
    return None


def all_reduce(array: np.ndarray, op: Op = "sum") -> np.ndarray:
    """Combine an array of equal shape from every rank elementwise; every rank gets the same bits back.

    Floats are combined and returned in float64, integers and booleans in int64, whatever went in; also with one
    process. Every rank must pass the same shape and kind. Collective.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce knows op 'sum', 'max' and 'min', not {op!r}")
    wide = _widen(array)
    if get_world_size() == 1 or wide.size == 0:
        return wide
    if op != "sum":
        gathered = np.stack(_all_gather(wide))
        return gathered.max(axis=0) if op == "max" else gathered.min(axis=0)
    import oneflow as flow

    return flow._C.local_all_reduce(flow.tensor(wide.reshape(-1))).numpy().reshape(wide.shape)


def _widen(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    raise TypeError(f"all_reduce takes an array of floats, integers or booleans, not dtype {array.dtype}")


def _all_gather(array: np.ndarray) -> list[np.ndarray]:
    """The arrays of all ranks, of equal shape and dtype, in rank order."""
    import oneflow as flow

    mine = flow.tensor(array.reshape(-1))
    received = [flow.empty(array.size, dtype=mine.dtype) for _ in range(get_world_size())]
    flow.comm.all_gather(received, mine)
    return [tensor.numpy().reshape(array.shape) for tensor in received]


def gather_arrays(array: np.ndarray) -> list[np.ndarray]:
    """The arrays of all ranks in rank order, on every rank; of one shape and dtype on all ranks. Collective."""
    return [one.astype(array.dtype) for one in _all_gather(_widen(array))] if get_world_size() > 1 else [array]


def any_rank(flag: bool) -> bool:
    """True on every rank when `flag` is true on at least one; how ranks agree to stop or save. Collective."""
    return bool(all_reduce(np.array([bool(flag)]), "sum")[0] > 0)


def broadcast_object(obj: Any, src: int = 0) -> Any:
    """The object of rank `src` on every rank; what the other ranks pass is ignored. Collective.

    JSON values only, nothing is pickled; they come back as JSON gives them (tuples as lists), also with one process.
    When `src` holds something else, every rank raises `TypeError`.
    """
    return gather_objects(obj if get_rank() == src else None)[src]


def result_of_rank_0(
    work: Callable[[], Any], mistake: type[Exception] = UserError, failed: type[Exception] = RuntimeError
) -> Any:
    """What `work` returns on rank 0, a JSON value, on every rank. Collective.

    What it raises rises on every rank: on the others as `mistake` where it is one of the user's, by its exit code, else
    as `failed`.
    """
    result, error = None, None
    if is_main_process():
        try:
            result = work()
        except Exception as raised:  # the others wait for the broadcast
            error = raised
    is_mistake = getattr(error, "exit_code", None) == EXIT_USER_MISTAKE
    text = None if error is None else str(error) or type(error).__name__
    result, text, is_mistake = broadcast_object([result, text, is_mistake])
    if text is not None:
        raise error or (mistake if is_mistake else failed)(text)
    return result


def gather_objects(obj: Any) -> list[Any]:
    """The objects of all ranks in rank order, on **every** rank; JSON values as in `broadcast_object`. Collective."""
    if get_world_size() == 1:
        return [json.loads(_encode(obj))]
    error, data = None, b""
    try:
        data = _encode(obj)
    except TypeError as raised:  # the others wait for the lengths
        error = raised
    lengths = [int(n[0]) for n in _all_gather(np.array([_NOT_ENCODABLE if error else len(data)], np.int64))]
    if _NOT_ENCODABLE in lengths:
        rank = lengths.index(_NOT_ENCODABLE)
        raise error or TypeError(f"rank {rank} passed an object that JSON cannot hold")
    payload = np.zeros(max(lengths), np.uint8)
    payload[: len(data)] = np.frombuffer(data, np.uint8)
    return [json.loads(one[:length].tobytes()) for one, length in zip(_all_gather(payload), lengths)]


def _encode(obj: Any) -> bytes:
    try:
        return json.dumps(obj).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"only JSON values travel between ranks (nothing is pickled), and {type(obj).__name__} is or holds "
            f"something else: {error}. Send numbers, text, lists and dicts; arrays go through all_reduce."
        ) from error


def barrier() -> None:
    """Wait until every rank has come here. Collective."""
    if get_world_size() > 1:
        import oneflow as flow

        flow.comm.barrier()
