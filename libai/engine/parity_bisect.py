"""Which part of ours makes two modes part: a pass over the compiled job, or else a module of the model.

`tools/parity.py CONFIG --bisect` switches the passes of `libai.engine.graphs` off, each alone and then together, until
the curves are equal. Not here: what OneFlow's own compiler does, and repairs that cannot be switched off in a process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from libai.engine import graphs
from libai.engine.parity_diagnosis import diagnose, diagnose_failure, loss_difference
from libai.engine.parity_report import strict
from libai.engine.parity_runs import Bench, Run

#: what a completed job goes through, by the name that `libai.engine.graphs` calls
PASSES: tuple[str, ...] = (
    "make_clip_norm_exact",
    "read_copies_of_variables",
    "remove_step_count",
    "remove_idle_ops",
    "fold_constants",
)


@dataclass(frozen=True)
class Culprit:
    """What `find_culprit` found.

    kind: "none" (the curves are equal), "pass", "module" or "unknown"; names: the smallest set of passes without which
    the curves are equal, or the module; worst: largest relative difference of a loss; tried: each set of passes that
    was switched off, and the difference then; text: what differs in the module.
    """

    kind: str
    names: tuple[str, ...] = ()
    worst: float = 0.0
    tried: tuple[tuple[tuple[str, ...], float], ...] = ()
    text: str = ""

    @property
    def exit_code(self) -> int:
        """0 for equal curves, else 1."""
        return int(self.kind != "none")

    def to_json(self) -> str:
        """All attributes as one JSON object; an infinite difference is text."""
        return json.dumps(strict(asdict(self)), indent=1)

    def __str__(self) -> str:
        lines = [f"without {' and '.join(names)}: {worst:.1e} apart" for names, worst in self.tried]
        what = {
            "none": "the curves are equal, so that nothing is to be found",
            "pass": f"guilty: {' and '.join(self.names)} (libai.engine.graphs), without which the curves are equal",
            "module": f"guilty: module {' and '.join(self.names)}: {self.text}",
            "unknown": "neither a pass nor a module could be singled out",
        }[self.kind]
        return "\n".join([f"as it is: {self.worst:.1e} apart", *lines, what])


def find_culprit(bench: Bench, bound: float) -> Culprit:
    """Search the smallest set of passes without which the losses agree to `bound`; without any, the module.

    Takes two runs, and up to eleven more. A pass that something else needs is no culprit: switched off, it leaves the
    curves apart.
    """
    eager = bench.run("eager")
    worst, first = _compare(eager, bench.run("graph"), bound)
    if worst <= bound:
        return Culprit("none", worst=worst)
    tried: list[tuple[tuple[str, ...], float]] = []

    def is_equal_without(names: Collection[str]) -> bool:
        with switched_off(names):
            tried.append((tuple(names), _compare(eager, bench.run("graph"), bound)[0]))
        return tried[-1][1] <= bound

    guilty = _smallest(is_equal_without)
    if guilty:
        return Culprit("pass", guilty, worst, tuple(tried))
    failed = eager.failure or first is None
    found = diagnose_failure(bench, "graph", 1) if failed else diagnose(bench, first or 1, bound)
    if found is None or found.module is None:
        return Culprit("unknown", (), worst, tuple(tried))
    return Culprit("module", (found.module or type(bench.model).__name__,), worst, tuple(tried), found.text)


def _smallest(is_equal_without: Callable[[Collection[str]], bool]) -> tuple[str, ...]:
    for name in PASSES:
        if is_equal_without((name,)):
            return (name,)
    if not is_equal_without(PASSES):
        return ()
    guilty = PASSES
    for name in PASSES:  # switch on again what is not needed off
        rest = tuple(other for other in guilty if other != name)
        if len(rest) > 1 and is_equal_without(rest):
            guilty = rest
    return guilty


@contextlib.contextmanager
def switched_off(names: Collection[str]) -> Iterator[None]:
    """Graphs that are compiled in the block leave these passes out."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(graphs, name, _do_nothing))
        yield


def _do_nothing(*_: Any) -> int:
    return 0


def _compare(eager: Run, graph: Run, bound: float) -> tuple[float, int | None]:
    """The largest relative difference of a loss, and the first iteration that has one beyond `bound`."""
    if eager.failure or graph.failure:
        return float("inf"), None
    apart = [loss_difference(a, b)[0] for a, b in zip(eager.losses, graph.losses)]
    first = next((i for i, one in enumerate(apart, 1) if one > bound), 1)
    return max(apart), first
