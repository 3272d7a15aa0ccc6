"""What makes two modes diverge: the smallest set of passes, compile options and repairs, or else modules of the model.

`tools/parity.py CONFIG --bisect` changes each of the switches of libai/engine/parity/bisection/switches.py that makes a
difference, alone and then several at once, until the curves are equal. Where no switch helps, the model is at fault,
and the first module that computes otherwise is named. A training that ends its process is searched from another one
(libai/engine/parity/bisection/journal.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from libai.engine.parity.bisection.journal import Journal
from libai.engine.parity.bisection.switches import Seen, Switch, environment_facts, find_switches, flipped, probing
from libai.engine.parity.diagnosis import Diagnosis, diagnose, diagnose_failure, loss_difference
from libai.engine.parity.report import strict
from libai.engine.parity.runs import Bench, Run

#: sets of several switches that are tried at most
_MOST_SETS = 60


@dataclass(frozen=True)
class Outcome:
    """One comparison: largest relative difference of a loss (infinite when a training failed), the first iteration
    beyond the bound, why the graph's training failed, and its losses."""

    worst: float
    first: int | None = None
    failure: str | None = None
    losses: tuple[float, ...] = ()

    @property
    def is_crash(self) -> bool:
        """The training ended its process."""
        return self.failure is not None and self.failure.startswith(Journal.CRASH)


@dataclass(frozen=True)
class Culprit:
    """What `find_culprit` found.

    kind: "none" (the curves are equal), "pass", "option" or "repair" (several, joined by " and ", for a set of them),
    "module" or "unknown"; names: the smallest set of switches without which the curves are equal, or the module;
    worst: largest relative difference of a loss; tried: each set that was switched, and the difference then; text: for
    each name one line with what it is, where, and what to do; stage: for a module, see `Diagnosis`; iteration: the
    first that differs; failure: why the graph's training ended; case: what became of the wish for a program that shows
    it with bare OneFlow (libai/engine/parity/bisection/minify.py).
    """

    kind: str
    names: tuple[str, ...] = ()
    worst: float = 0.0
    tried: tuple[tuple[tuple[str, ...], float], ...] = ()
    text: str = ""
    stage: str | None = None
    iteration: int | None = None
    failure: str | None = None
    case: str = ""

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> Culprit:
        """The one that `dataclasses.asdict` and JSON have made of it."""
        tried = tuple((tuple(names), worst) for names, worst in attributes["tried"])
        return cls(**{**attributes, "names": tuple(attributes["names"]), "tried": tried})

    @property
    def exit_code(self) -> int:
        """0 for equal curves, else 1."""
        return int(self.kind != "none")

    def to_json(self) -> str:
        """All attributes as one JSON object; an infinite difference is text."""
        return json.dumps(strict(asdict(self)), indent=1)

    def __str__(self) -> str:
        if self.kind == "none":
            text = f"as it is: {_apart(self.worst)}\nthe curves are equal, so that nothing is to be found"
            return "\n".join(filter(None, [text, self.case]))
        lines = [f"as it is: {_apart(self.worst)}{f' ({self.failure})' if self.failure else ''}"]
        lines += [f"with {' and '.join(names)}: {_apart(worst)}" for names, worst in self.tried]
        several = f"guilty, all {len(self.names)} together:\n" if len(self.names) > 1 else ""
        lines.append(several + "\n".join(f"guilty: {line}" for line in self.text.splitlines()))
        if self.kind == "unknown":
            lines[-1] = f"not found: {self.text}"
        return "\n".join([*lines, *filter(None, [self.case])])


def _apart(worst: float) -> str:
    return "a training fails" if worst == float("inf") else f"{worst:.1e} apart"


def find_culprit(bench: Bench, bound: float, journal: Journal | None = None) -> Culprit:
    """Search the smallest set of switches that makes the losses agree to `bound`; without any, the module.

    Takes three runs and one for each switch that can matter, up to 60 for sets of several. `journal`: of a search that
    may be continued in another process, without which what ends a process ends the search.
    """
    return _Search(bench, bound, journal or Journal()).culprit()


class _Search:
    def __init__(self, bench: Bench, bound: float, journal: Journal):
        self.bench, self.bound, self.journal = bench, bound, journal
        self.tried: list[tuple[tuple[str, ...], float]] = []

    def culprit(self) -> Culprit:
        facts = self.journal.recall("environment", environment_facts() if self.journal.path else {})
        self.journal.remember("environment", facts)
        with probing(lambda seen: self.journal.remember("seen", asdict(seen))):
            before = self._compare(())
        again = before if before.is_crash else self._compare((), repeat=1)
        self.is_noisy = before != again
        self.before = max((before, again), key=lambda one: one.worst)
        if self.before.worst <= self.bound:
            return Culprit("none", worst=self.before.worst)
        seen = Seen(**self.journal.recall("seen", {}))
        switches = find_switches(seen, self.bench.options, facts)
        guilty = self._smallest([one for one in switches if self.before.is_crash or not one.needs_crash])
        if guilty:
            kinds = list(dict.fromkeys(one.kind for one in guilty))
            text = "\n".join(map(str, guilty))
            return self._found(" and ".join(kinds), tuple(one.name for one in guilty), text)
        return self._module()

    def _found(self, kind: str, names: tuple[str, ...], text: str, stage: str | None = None) -> Culprit:
        before = self.before
        return Culprit(kind, names, before.worst, tuple(self.tried), text, stage, before.first, before.failure)

    # ------------------------------------------------------------------ switches

    def _smallest(self, switches: Sequence[Switch]) -> tuple[Switch, ...]:
        """The first switch that makes the curves equal, or the smallest set of those that change the curve."""
        changing: list[Switch] = []
        for kind in ("on", "off"):
            for _, group in itertools.groupby([s for s in switches if s.turn == kind], key=lambda one: one.kind):
                members = list(group)
                if len(members) > 2 and not self._changes(members):
                    continue  # none of them acts in this training
                for one in members:
                    outcome = self._try([one])
                    if outcome.worst <= self.bound:
                        return (one,)
                    if self._differs(outcome):
                        changing.append(one)
        sets = (group for size in range(2, len(changing) + 1) for group in itertools.combinations(changing, size))
        for chosen in itertools.islice(sets, _MOST_SETS):
            if self._try(chosen).worst <= self.bound:
                return chosen
        return ()

    def _changes(self, switches: Sequence[Switch]) -> bool:
        """Whether flipping all of them does anything to the curve; what needs a new process counts as if it did."""
        return any(one.environment for one in switches) or self._differs(self._compare(switches))

    def _differs(self, outcome: Outcome) -> bool:
        return self.is_noisy or outcome != self.before

    def _try(self, switches: Sequence[Switch]) -> Outcome:
        outcome = self._compare(switches)
        if self.is_noisy and outcome.worst <= self.bound:  # it may have been luck
            outcome = max((self._compare(switches, repeat) for repeat in (1, 2)), key=lambda one: one.worst)
        self.tried.append((tuple(f"{one.name} {one.turn}" for one in switches), outcome.worst))
        return outcome

    def _compare(self, switches: Sequence[Switch], repeat: int = 0) -> Outcome:
        """Train in both modes with `switches` flipped, or look up what became of it."""
        key = " + ".join([*(f"{one.name} {one.turn}" for one in switches), *([f"run {repeat + 1}"] if repeat else [])])
        environment = dict(pair for one in switches for pair in one.environment)

        def compare() -> dict[str, Any]:
            with flipped(switches):
                eager = self.eager if not any(one.is_eager for one in switches) else self.bench.run("eager")
                return asdict(_outcome(eager, self.bench.run("graph"), self.bound))

        found = self.journal.run(key or "as it is", compare, environment)
        return Outcome(**{**found, "losses": tuple(found["losses"])})

    @property
    def eager(self) -> Run:
        """The eager training of this process as it is."""
        if not hasattr(self, "_eager"):
            self._eager = self.bench.run("eager")
        return self._eager

    # ------------------------------------------------------------------ modules

    def _module(self) -> Culprit:
        self.journal.run("modules", lambda: None)  # in the environment as it was
        if self.before.is_crash:
            text = f"{self.before.failure}, and with every switch changed it does so as well"
            return self._found("unknown", (), text)
        found = self._diagnose()
        if found is None or found.module is None:
            return self._found("unknown", (), "neither a switch nor a module could be singled out")
        name = found.module or type(self.bench.model).__name__
        advice = (
            "The same line of forward must mean the same in both modes: look for is_tracing, Python state and "
            "operations that OneFlow compiles otherwise; --minify FILE writes the case without libai."
        )
        where = type(dict(self.bench.model.named_modules())[found.module]).__name__
        return self._found(
            "module", (name,), f"module {name} ({where}, {found.stage}): {found.text}. {advice}", found.stage
        )

    def _diagnose(self) -> Diagnosis | None:
        if self.eager.failure:
            return diagnose_failure(self.bench, "eager", len(self.eager.losses) + 1)
        if self.before.failure:
            return diagnose_failure(self.bench, "graph", len(self.before.losses) + 1)
        return diagnose(self.bench, self.before.first or 1, self.bound)


def _outcome(eager: Run, graph: Run, bound: float) -> Outcome:
    losses = tuple(losses["loss"] for losses in graph.losses)
    failure = eager.failure or graph.failure
    if failure:
        return Outcome(float("inf"), None, failure, losses)
    apart = [loss_difference(a, b)[0] for a, b in zip(eager.losses, graph.losses)]
    apart = [float("inf") if one != one else one for one in apart]
    first = next((i for i, one in enumerate(apart, 1) if one > bound), None)
    return Outcome(max(apart), first, None, losses)
