"""What a bisection of a parity check can switch: passes over the compiled job, compile options, repairs of OneFlow.

A `Switch` changes one of them inside of a context. `probing` sees, while a graph is compiled, which are in force. Not
here: the search over them (libai/engine/parity/bisection/search.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from libai.engine.graph import graphs, tracing
from libai.engine.trainer import forward_pass, model_trainer
from libai.engine.trainer import graph as graph_trainer
from libai.native.kernels import VARIABLE as KERNELS
from libai.native.kernels import kernels_in_use
from libai.native.symbol_table import Unavailable, address_of, find_slot, open_oneflow
from libai.oneflow_fixes import launch_race
from libai.oneflow_fixes.fixes import FIXES
from libai.oneflow_fixes.job import passes
from libai.oneflow_fixes.job import variables as graph_variables
from libai.oneflow_fixes.openblas import VARIABLE as OPENBLAS
from libai.oneflow_fixes.openblas import openblas_in_use

_REPORT = "It is a fault of libai: please report it with this output. Until then train with graph.enabled=false."
_RACE = "libai/oneflow_fixes/launch_race.py: a job that is over waits for its entry, decision 0006"


@dataclass(frozen=True)
class Switch:
    """One thing that a bisection changes.

    `kind`: "pass" (over the compiled job), "option" or "repair"; `turn`: "off" or "on", what the context does to it;
    `where`: its place; `advice`: what to do when it is guilty. `flip()`: the context, entered before models are built.
    `is_eager`: it changes eager training too. `environment`: variables that only a new process takes; None unsets.
    `needs_crash`: worth trying only where the training ends the process.
    """

    kind: str
    name: str
    turn: str
    where: str
    advice: str
    flip: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    is_eager: bool = False
    environment: tuple[tuple[str, str | None], ...] = ()
    needs_crash: bool = False

    def __str__(self) -> str:
        state = "is at fault" if self.turn == "off" else "is missing"
        return f"{self.kind} {self.name} {state} ({self.where}). {self.advice}"


#: what a completed job goes through: its name → its file and what it does
PASSES: Mapping[str, str] = {
    "decay_in_updates": "libai/oneflow_fixes/job/updates.py: updates add the decay of SGD and Adam to gradients",
    **{
        name: f"{module.replace('.', '/')}.py: {fix.why}, decision {fix.decision}"
        for fix in FIXES
        for module, _, name in [fix.apply.rpartition(".")]
        if hasattr(passes, name) and "ranks" not in fix.applies_to and module.startswith("libai.oneflow_fixes.job.")
    },
}
#: fields of OneFlow's configurations that are no options: nn.Graph and the optimizer fill them in every graph
_NO_OPTIONS = ("job_name", "train_conf", "predict_conf", "optimizer_conf", "num_gradient_accumulation_steps")
_STAND_INS = ("ProxyModule", "ProxyTensor", "ProxyParameterList", "ProxyParameterDict")


@dataclass
class Seen:
    """What a graph was compiled with. `options`: field of OneFlow's configuration → value; `reads_copies` of variables;
    `accumulates` by OneFlow's own means; `has_hooks` of modules; `writes_buffers` after each step."""

    options: dict[str, str] = field(default_factory=dict)
    reads_copies: bool = False
    accumulates: bool = False
    has_hooks: bool = False
    writes_buffers: bool = False


@contextlib.contextmanager
def probing(note: Callable[[Seen], object]) -> Iterator[None]:
    """Tell `note` what graphs are compiled with in the block, at every new fact: the process may not live on."""
    seen = Seen()

    def configured(graph: Any) -> None:
        proto = graph.config.proto
        seen.options = {
            one.name: " ".join(str(value).split())
            for conf in (proto, proto.train_conf)
            for one, value in conf.ListFields()
            if one.name not in _NO_OPTIONS
        }
        seen.accumulates = proto.num_gradient_accumulation_steps > 1

    def noting(owner: Any, name: str, fact: str) -> AbstractContextManager[Any]:
        original = getattr(owner, name)

        def noted(*args: Any) -> Any:
            result = original(*args)
            if fact == "options":
                configured(*args)
            elif result != 0:  # of the pass, how many variables were copied
                setattr(seen, fact, True)
            note(seen)
            return result

        return mock.patch.object(owner, name, noted)

    with (
        noting(graphs.TrainGraph, "_generate_config_proto", "options"),
        noting(passes, "read_copies_of_variables", "reads_copies"),
        noting(tracing, "_hooks_in_forward", "has_hooks"),
        noting(graph_trainer, "write_buffers", "writes_buffers"),
    ):
        yield


def find_switches(seen: Seen, options: Mapping[str, Any], environment: Mapping[str, str]) -> list[Switch]:
    """What can be changed about the graphs that were `seen`, the likeliest first: missing repairs, passes, options,
    repairs in force. `options`: of the trainers; `environment`: what `environment_facts` told the first process, or
    nothing where no new process can be started."""
    return [
        *_missing_repairs(seen),
        *_passes(seen),
        *_compile_options(seen, options),
        *_environment(environment),
        *_repairs_in_force(seen),
    ]


# ------------------------------------------------------------------------------------------------ passes


def _passes(seen: Seen) -> Iterator[Switch]:
    for name, where in PASSES.items():
        if name != "read_copies_of_variables" or seen.reads_copies:
            yield Switch("pass", name, "off", where, _REPORT, _patched(passes, name, _do_nothing))


def _do_nothing(*_: Any) -> int:
    return 0


def _patched(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """What a switch flips: `owner.name` is `value`."""
    return functools.partial(mock.patch.object, owner, name, value)


# ------------------------------------------------------------------------------------------------ options


def _compile_options(seen: Seen, options: Mapping[str, Any]) -> Iterator[Switch]:
    config = "nn.Graph's config"
    for name, value in seen.options.items():
        leave_out = f"Leave it out: without it the curves are equal. It was {value}."
        yield Switch("option", f"config.{name}", "off", config, leave_out, functools.partial(_without_option, name))
    if seen.accumulates:
        yield Switch(
            "option",
            "config.set_gradient_accumulation_steps",
            "off",
            f"{config}, from train.num_accumulation_steps",
            "Traced one micro-batch behind the other the curves are equal. Train without accumulation, or eagerly.",
            _patched(graph_trainer.GraphTrainer, "_in_turn", True),
        )
    if options.get("activation_checkpoint"):
        yield Switch(
            "option",
            "activation_checkpointing",
            "off",
            "train.activation_checkpoint.enabled",
            "Leave it out, or keep the blocks' forward free of what a second call computes otherwise.",
            _patched(model_trainer.ModelTrainer, "_recomputed_blocks", lambda self: []),
            is_eager=True,
        )


@contextlib.contextmanager
def _without_option(name: str) -> Iterator[None]:
    """Graphs are compiled with OneFlow's default for a field of their configuration."""
    configure = graphs.TrainGraph._generate_config_proto

    def configuring(graph: Any) -> None:
        configure(graph)
        for conf in (graph.config.proto, graph.config.proto.train_conf):
            if name in conf.DESCRIPTOR.fields_by_name:
                conf.ClearField(name)

    with mock.patch.object(graphs.TrainGraph, "_generate_config_proto", configuring):
        yield


def environment_facts() -> dict[str, str]:
    """The variables that are read when OneFlow is imported, and under "openblas" and "kernels" what is chosen then."""
    return {
        **{name: os.environ[name] for name in os.environ if name.startswith("ONEFLOW_") or name in (OPENBLAS, KERNELS)},
        "openblas": openblas_in_use(),
        "kernels": kernels_in_use(),
    }


def _environment(facts: Mapping[str, str]) -> Iterator[Switch]:
    """Not from the process's own environment: it may be one that a trial has asked for."""
    for name in sorted({*facts} - {"openblas", "kernels"}):
        advice = f"Leave it out: without it the curves are equal. It was {facts[name]}."
        yield Switch("option", name, "off", "environment", advice, is_eager=True, environment=((name, None),))
    products = f"libai/oneflow_fixes/openblas.py: matrix products of OpenBLAS {facts.get('openblas')}, decision 0010"
    kernels = "libai/native: CPU kernels of libai inside OneFlow, decision 0015"
    for is_ours, name, where, variable, value in (
        (facts.get("openblas", "bundled") != "bundled", "current OpenBLAS", products, OPENBLAS, "bundled"),
        (facts.get("kernels", "").startswith("libai's"), "CPU kernels", kernels, KERNELS, "0"),
    ):
        if is_ours:
            advice = f"With OneFlow's own the curves are equal: set {variable}={value}, and report it with this output."
            yield Switch("repair", name, "off", where, advice, is_eager=True, environment=((variable, value),))


# ------------------------------------------------------------------------------------------------ repairs


def _missing_repairs(seen: Seen) -> Iterator[Switch]:
    if not launch_race.protect_graph_launches.is_done:  # nothing was launched: the process before this one has died
        with launch_race.protect_graph_launches():
            pass
    if launch_race.is_race_open():
        advice = "Launches of short graphs crash or hang: let protect_graph_launches make it before the first launch."
        yield Switch("repair", "launch_race", "on", _RACE, advice, functools.partial(_guard, True), needs_crash=True)
    if not seen.reads_copies:
        where = "libai/oneflow_fixes/job/variables.py: the model reads copies of its weights, decision 0007"
        advice = (
            "An update writes a weight that is still read: let TrainGraph._needs_copies be true for such a graph. "
            "Until then train with graph.enabled=false."
        )
        yield Switch("repair", "read_copies_of_variables", "on", where, advice, _with_copies)


def _repairs_in_force(seen: Seen) -> Iterator[Switch]:
    groups = {
        "stand-ins of modules": [one for one in tracing._REPLACEMENTS if one[0].__name__ in _STAND_INS],
        "copy_ and zero_": [one for one in tracing._REPLACEMENTS if one[1] in ("copy_", "zero_")],
        "data and detach": [one for one in tracing._REPLACEMENTS if one[1] in ("data", "detach")],
    }
    tracing_file = "libai/engine/graph/tracing.py, decision 0012"
    for name, group in groups.items():
        flip = _patched(tracing, "_REPLACEMENTS", [one for one in tracing._REPLACEMENTS if one not in group])
        yield Switch("repair", f"tracing of {name}", "off", tracing_file, _REPORT, flip)
    if seen.has_hooks:
        flip = _patched(tracing, "_hooks_in_forward", lambda *_: contextlib.nullcontext())
        yield Switch("repair", "tracing of hooks", "off", tracing_file, _REPORT, flip)
    if seen.writes_buffers:
        flip = _patched(graph_trainer, "write_buffers", _do_nothing)
        where = "libai/engine/graph/traced_state.py: buffers take what the step returned, decision 0012"
        yield Switch("repair", "writing of buffers", "off", where, _REPORT, flip)
    flip = _patched(forward_pass, "values_kept", lambda *_: contextlib.nullcontext())
    where = "libai/forward/in_place.py: eager backward reads buffers as forward did, decision 0012"
    yield Switch("repair", "values of buffers kept", "off", where, _REPORT, flip, is_eager=True)
    if launch_race.is_race_open() is False:
        yield Switch("repair", "launch_race", "off", _RACE, _REPORT, functools.partial(_guard, False), needs_crash=True)


@contextlib.contextmanager
def _with_copies() -> Iterator[None]:
    genuine = graph_variables.read_copies_of_variables
    with (
        mock.patch.object(graphs.TrainGraph, "_needs_copies", True),
        mock.patch.object(passes, "read_copies_of_variables", genuine),
    ):
        yield


@contextlib.contextmanager
def _guard(is_guarded: bool) -> Iterator[None]:
    oneflow = open_oneflow()
    slot = find_slot(oneflow, launch_race._DEQUEUE)
    before = slot.value
    if is_guarded:
        with contextlib.suppress(Unavailable, OSError):
            launch_race._guard_dequeue()
    else:
        slot.value = address_of(oneflow, launch_race._DEQUEUE)
    try:
        yield
    finally:
        slot.value = before


@contextlib.contextmanager
def flipped(switches: Iterable[Switch]) -> Iterator[None]:
    """Trainings in the block run with all of `switches` flipped."""
    with contextlib.ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch.flip())
        yield
