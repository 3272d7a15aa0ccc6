"""Rank and device of this process, and the few collectives that a trainer needs.

Ranks are read from the environment set by `oneflow.distributed.launch`, without importing oneflow.
The collectives import it only if there is more than one process. Collectives run on CPU tensors in
the order of the calls. Every rank must call the same ones in the same order, from one thread.

`libai.parallel.Mesh` handles layouts: which ranks share a model or a batch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from libai.utils.errors import EXIT_USER_MISTAKE, UserError
from libai.utils.rank_notes import own_state, ranks_ahead

logger = logging.getLogger("libai.utils")

_FIRST, _LAST = (6, 0), (8, 9)
#: the wheel has machine code for sm_60 ... sm_86 and no PTX that a driver could compile; 8.9 runs
#: the code of 8.6
_SUPPORTED = "compute capability 6.0 to 8.9 (Pascal to Ada)"
#: sent instead of a length by a rank if JSON cannot encode its object; the others then fail too
#: instead of waiting
_NOT_ENCODABLE = -1


def _from_launcher(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"environment variable {name}={text!r} is not a whole number, so the rank of this "
            "process is unknown. Unset it, or start with `libai train`, which sets it."
        ) from None


def get_rank() -> int:
    """Return the 0-based rank of this process in the job, or 0 without a launcher."""
    return max(0, _from_launcher("RANK", 0))  # `import oneflow` sets RANK=-1 without a launcher


def get_world_size() -> int:
    """Return the number of processes of the job, or 1 without a launcher."""
    return _from_launcher("WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return the 0-based rank on this machine, or 0 without a launcher.

    It is also the index of the rank's GPU.
    """
    return _from_launcher("LOCAL_RANK", 0)


def is_main_process() -> bool:
    """Return True on rank 0, which prints and writes."""
    return get_rank() == 0


def default_device(device: str = "auto") -> str:
    """Resolve "auto", "cpu" or "cuda" to the device type of this process, "cpu" or "cuda".

    "auto" is CUDA if oneflow finds GPUs and has machine code for all of them. Otherwise it is the
    CPU, with a warning if there are GPUs that cannot be used. "cuda" raises `UserError` if CUDA
    cannot be used. Both raise `UserError` if this machine has fewer GPUs than ranks.
    """
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UserError(
            f"train.device={device!r} is not a device type. Use auto, cpu or cuda; each process "
            "takes the GPU whose index is its local rank (CUDA_VISIBLE_DEVICES chooses among "
            "them)."
        )
    import oneflow as flow

    count = flow.cuda.device_count() if flow.cuda.is_available() else 0
    obstacle = _explain_no_cuda(count)
    if obstacle is not None and device == "cuda":
        raise UserError(
            f"train.device=cuda is not possible: {obstacle}. Use train.device=cpu or auto."
        )
    if obstacle is not None:
        if count:
            logger.warning("training on the CPU: %s", obstacle)
        return "cpu"
    if (
        get_local_rank() >= count
    ):  # if only some ranks used the CPU, all would wait for each other forever
        raise UserError(
            f"train.device={device}: local rank {get_local_rank()} needs its own GPU, but this "
            f"machine has {count}. Start at most {count} processes here, or use train.device=cpu."
        )
    return "cuda"


def prepare_device(device: str, is_eager: bool) -> None:
    """Make OneFlow compute on its scheduler thread in eager mode on CPU, unless the user has chosen
    otherwise.

    That thread spins while a worker computes, so ranks would take each other's cores. The setting
    would make graph mode slower. It has no effect after the first tensor has been created.
    """
    if is_eager and default_device(device) == "cpu":
        os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")


def _explain_no_cuda(count: int) -> str | None:
    """Return why the `count` GPUs of this machine cannot be used, or None.

    All its ranks get the same answer.
    """
    import oneflow as flow

    if not count:
        return (
            "oneflow sees no usable GPU here (no NVIDIA driver, no device, or "
            "CUDA_VISIBLE_DEVICES hides it)"
        )
    cuda = flow.cuda
    return explain_unsupported(
        [(cuda.get_device_name(i), tuple(cuda.get_device_capability(i))) for i in range(count)]
    )


def explain_unsupported(devices: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
    """Return the reason why a GPU cannot be used, or None if all can.

    `devices` holds names and compute capabilities.

    >>> explain_unsupported([("A100", (8, 0))]) is None
    True
    """
    for index, (name, capability) in enumerate(devices):
        if not _FIRST <= capability <= _LAST:
            return (
                f"GPU {index} ({name}) has compute capability {'.'.join(map(str, capability))}, "
                f"and OneFlow 0.9.0 has machine code for {_SUPPORTED}. Hide it with "
                "CUDA_VISIBLE_DEVICES if there are other GPUs"
            )
    return None


def all_reduce(array: np.ndarray, op: Literal["sum", "max"] = "sum") -> np.ndarray:
    """Combine the arrays of all ranks elementwise. Every rank gets the same bits back.

    Floats are combined and returned in float64, and integers and booleans in int64, also with one
    process. Every rank must pass the same shape and kind. Collective.
    """
    wide = _widen(array)
    if get_world_size() == 1 or wide.size == 0:
        return wide
    if op == "max":
        return np.stack(_all_gather(wide)).max(axis=0)
    import oneflow as flow

    own_state().collectives += 1
    return flow._C.local_all_reduce(flow.tensor(wide.reshape(-1))).numpy().reshape(wide.shape)


def _widen(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    raise TypeError(
        f"all_reduce takes an array of floats, integers or booleans, not dtype {array.dtype}"
    )


def _all_gather(array: np.ndarray) -> list[np.ndarray]:
    """Return the arrays of all ranks in rank order. They must have equal shapes and dtypes."""
    import oneflow as flow

    mine = flow.tensor(array.reshape(-1))
    own_state().collectives += 1
    received = [flow.empty(array.size, dtype=mine.dtype) for _ in range(get_world_size())]
    flow.comm.all_gather(received, mine)
    return [tensor.numpy().reshape(array.shape) for tensor in received]


def gather_arrays(array: np.ndarray) -> list[np.ndarray]:
    """Return the arrays of all ranks in rank order, on every rank.

    Shapes and dtypes must be equal. Collective.
    """
    return (
        [one.astype(array.dtype) for one in _all_gather(_widen(array))]
        if get_world_size() > 1
        else [array]
    )


def any_rank(flag: bool) -> bool:
    """Return True on every rank if `flag` is true on any.

    Ranks use it to agree to stop or save. Collective.
    """
    return bool(all_reduce(np.array([bool(flag)]))[0] > 0)


def broadcast_object(obj: Any) -> Any:
    """Return the object of rank 0 on every rank.

    The objects of other ranks are ignored. Collective.

    Only JSON values are supported, and nothing is pickled. Values are returned as JSON decodes them
    (tuples as lists), also with one process. Every rank raises `TypeError` if rank 0 passes
    anything else.
    """
    return gather_objects(obj if is_main_process() else None)[0]


def result_of_rank_0(
    work: Callable[[], Any],
    mistake: type[Exception] = UserError,
    failed: type[Exception] = RuntimeError,
) -> Any:
    """Call `work` on rank 0 and return its result, a JSON value, on every rank. Collective.

    If `work` raises an exception, every rank raises. Rank 0 raises the exception itself. The other
    ranks raise `mistake` if its exit code marks a user mistake, and `failed` otherwise, marked as a
    consequence for the launcher.
    """
    result = None
    error: Any = None
    if is_main_process():
        try:
            result = work()
        except Exception as raised:  # the other ranks are waiting for the broadcast
            error = raised
    is_mistake = getattr(error, "exit_code", None) == EXIT_USER_MISTAKE
    text = None if error is None else str(error) or type(error).__name__
    result, text, is_mistake = broadcast_object([result, text, is_mistake])
    if text is not None and error is None:
        error = (mistake if is_mistake else failed)(text)
        error.is_consequence = True
    if error is not None:
        raise error
    return result


def gather_objects(obj: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, on **every** rank.

    Only JSON values, as in `broadcast_object`.

    Collective.
    """
    if get_world_size() == 1:
        return [json.loads(_encode(obj))]
    error, data = None, b""
    try:
        data = _encode(obj)
    except TypeError as raised:  # the other ranks are waiting for the lengths
        error = raised
    lengths = [
        int(n[0]) for n in _all_gather(np.array([_NOT_ENCODABLE if error else len(data)], np.int64))
    ]
    if _NOT_ENCODABLE in lengths:
        rank = lengths.index(_NOT_ENCODABLE)
        raise error or TypeError(f"rank {rank} passed an object that JSON cannot hold")
    payload = np.zeros(max(lengths), np.uint8)
    payload[: len(data)] = np.frombuffer(data, np.uint8)
    return [
        json.loads(one[:length].tobytes()) for one, length in zip(_all_gather(payload), lengths)
    ]


def _encode(obj: Any) -> bytes:
    try:
        return json.dumps(obj).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            "only JSON values can be sent between ranks (nothing is pickled), but this "
            f"{type(obj).__name__} is or contains something else: {error}. Send numbers, text, "
            "lists and dicts; use all_reduce for arrays."
        ) from error


def require_all_ranks(field: str, number: int, action: str, remedy: str) -> None:
    """Raise `UserError` if this rank does something that not all ranks do at this point.

    `field`, `number`: see `ranks_ahead`. `action` and `remedy`: for the error.
    """
    ahead = ranks_ahead(field, number)
    if ahead:
        raise UserError(f"rank {get_rank()} {action}, but rank {ahead[0]} continues. {remedy}")


def barrier() -> None:
    """Wait until every rank has called this. Collective."""
    if get_world_size() > 1:
        import oneflow as flow

        flow.comm.barrier()
