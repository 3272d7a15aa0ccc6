"""The table of repairs: what each is for, where it is made, and which of them are on.

`LIBAI_FIXES=-openblas,-switch-interval` leaves optional ones out. With another OneFlow than 0.9.0, for which they were
measured, all optional ones are left out. Standard library only. Not here: the repairs themselves.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from libai.utils.errors import UserError

VARIABLE = "LIBAI_FIXES"
ONEFLOW_VERSION = "0.9.0"
#: switches that say the same: variable -> its value, and the fix that it leaves out
_SAME = {"LIBAI_OPENBLAS": ("bundled", "openblas"), "LIBAI_NATIVE": ("0", "kernels")}


@dataclass(frozen=True)
class Fix:
    """One repair. `decision`: the number of the page that tells why; `apply`: the function or class that makes it."""

    name: str
    why: str
    decision: str
    is_needed: bool
    applies_to: str
    apply: str


#: for each its name, decision, what it applies to and what makes it; then why. What cannot be left out is `needed`
_TABLE = """\
openblas | 0010 | CPU | patches.openblas.use_current
    matrix products of a current OpenBLAS
threads | 0021 | CPU | patches.openblas.use_threads
    large operations on several cores
kernels | 0015 | CPU | native.kernels.use_kernels
    CPU kernels of libai/native
layer-norm | 0015 | CPU with kernels | native.layer_norm.use_operation
    layer and group norm are one operation; replaces functions of OneFlow's Python
dropout-mask | 0002 | CPU with kernels | layers.random.dropout_mask
    the mask of libai.layers.Dropout is one operation
eager-updates | 0015 | eager mode on CPU with kernels | optim.joined.JoinedUpdates
    one operation computes the norm of all gradients, or updates many parameters
switch-interval | 0009 | training | patches.threads.quick_thread_switches
    OneFlow's threads get the interpreter's lock sooner; process-wide while training
launch-race | 0006 | graphs | patches.launch_race.protect_graph_launches
    a graph that ends before it was entered crashes the process
polling-thread | 0019 | graphs on CPU | patches.polling.let_polling_threads_sleep
    threads that poll for the end of a graph sleep between looks; process-wide from the first graph on
step-count | 0001 | graphs | patches.job.variables.remove_step_count
    OneFlow's own count of steps, which no update reads, is taken out
idle-ops | 0001 | graphs | patches.job.needless.remove_idle_ops
    operations that change nothing are taken out
constants | 0001 | graphs | patches.job.needless.fold_constants
    constants are made by one operation each
scaled-updates | 0015 | graphs on CPU with kernels | patches.job.updates.scale_in_updates
    updates clip and decay gradients, in place of operations for each parameter
joined-updates | 0015 | graphs on CPU with kernels | patches.job.updates.join_updates
    one operation updates many parameters
two-threads | 0019 | graphs of one process, one thread an operation | patches.job.schedule.schedule_on_two_threads
    each operation has a thread by what waits for it
joined-gradients | 0019 | graphs of several CPU ranks | patches.job.gradients.join_gradients
    ranks add up gradients in few messages
needed clip-norm | 0001 | graphs | patches.job.clip.make_clip_norm_exact
    an exact norm of all gradients
needed variable-copies | 0007 | graphs | patches.job.variables.read_copies_of_variables
    forward and backward read weights that no update changes meanwhile
needed operations | 0020 | all tensors | patches.local_operations.repair_operations
    functions whose gradient or device is wrong
needed global-operations | 0020 | global tensors | patches.global_tensors.operations.repair_global_operations
    operations that OneFlow refuses or computes wrongly
needed buffers-in-place | 0012 | eager mode | forward.in_place.values_kept
    the backward pass reads buffers as forward did
needed tracing | 0012 | graphs | engine.compiled.tracing.tracing
    what OneFlow's tracing leaves out or gets wrong
"""


def _read_table() -> Iterator[Fix]:
    lines = _TABLE.splitlines()
    for facts, why in zip(lines[::2], lines[1::2]):
        name, decision, applies_to, apply = facts.split(" | ")
        is_needed = name.startswith("needed ")
        yield Fix(name.removeprefix("needed "), why.strip(), decision, is_needed, applies_to, f"libai.{apply}")


FIXES = tuple(_read_table())
_BY_NAME = {fix.name: fix for fix in FIXES}


def left_out() -> frozenset[str]:
    """The fixes that the environment leaves out; `UserError` for anything but optional ones with a minus sign."""
    others = frozenset(fix for name, (value, fix) in _SAME.items() if os.environ.get(name) == value)
    return _read(os.environ.get(VARIABLE, "")) | others


@functools.lru_cache(maxsize=8)
def _read(text: str) -> frozenset[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    optional = [fix.name for fix in FIXES if not fix.is_needed]
    if wrong := [word for word in words if word[:1] != "-" or word[1:] not in optional]:
        raise UserError(
            f"{VARIABLE} has {', '.join(map(repr, wrong))}; it takes optional fixes of OneFlow to leave out, such as "
            f"-{optional[0]},-{optional[1]}. These are optional: {', '.join(optional)}."
        )
    return frozenset(word[1:] for word in words)


def is_on(name: str) -> bool:
    """Whether to make the fix `name`. Needed ones are always made."""
    return _BY_NAME[name].is_needed or (is_known_version() and name not in left_out())


def is_known_version() -> bool:
    """Return True for OneFlow 0.9.0, also while none is imported."""
    version = getattr(sys.modules.get("oneflow"), "__version__", ONEFLOW_VERSION)
    return version.partition("+")[0] == ONEFLOW_VERSION


def fixes_that_are_on() -> list[str]:
    """Their names, for reports."""
    return [fix.name for fix in FIXES if is_on(fix.name)]


def describe_fixes() -> str:
    """For the banner: how many fixes are on, and which are left out and why."""
    off = [fix.name for fix in FIXES if not is_on(fix.name)]
    reason = "as asked" if is_known_version() else f"made for oneflow {ONEFLOW_VERSION}"
    left_out = f"; left out: {', '.join(off)} ({reason})" if off else ""
    return f"{len(FIXES) - len(off)} of {len(FIXES)} repairs of oneflow{left_out}"
