"""What a benchmark measures: cases (a config with overrides) and, in each, the variants that are interleaved.

Imports no oneflow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libai.config import batch_sizes_of, load_config
from libai.launch.installation import LAUNCH, ROOT
from libai.utils.errors import UserError

#: a constant learning rate, which a stock graph needs, and nothing in the loop but training
MEASURED_TRAINING = (
    *("lr_scheduler=null", "train.warmup_ratio=0"),
    *("train.train_iter=1000000", "train.train_epoch=0", "train.max_seconds=null"),
    *("train.evaluation.enabled=false", "train.checkpointer.enabled=false"),
)
_WORKER_THREAD = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"


@dataclass(frozen=True)
class Mode:
    """How a variant runs a config.

    base: "eager", "graph" or "gemm". is_raw: a hand-written loop instead of our trainer. syncs: reads the loss in every
    iteration. is_stock: a process without our settings and CPU kernels. is_perturbed: the weights start off by their
    last bit.
    """

    name: str
    base: str
    is_raw: bool = False
    syncs: bool = False
    is_stock: bool = False
    is_perturbed: bool = False

    def environment(self, device: str, given: Mapping[str, str]) -> dict[str, str | None]:
        """Variables for its processes, to set or (None) to remove, as the launcher has them for training."""
        if self.is_stock:
            return {"OPENBLAS_CORETYPE": None, _WORKER_THREAD: None, "LIBAI_OPENBLAS": "bundled", "LIBAI_NATIVE": "0"}
        on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
        return {_WORKER_THREAD: "0"} if self.base != "graph" and on_cpu and _WORKER_THREAD not in given else {}


#: the peak, and how a training amplifies rounding; the user names neither
GEMM, PERTURBED = Mode("gemm", "gemm"), Mode("perturbed", "eager", is_raw=True, is_perturbed=True)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("eager", "eager"),
        Mode("graph", "graph"),
        Mode("raw-eager", "eager", is_raw=True),
        Mode("raw-eager-sync", "eager", is_raw=True, syncs=True),
        Mode("raw-graph", "graph", is_raw=True),
        Mode("raw-graph-sync", "graph", is_raw=True, syncs=True),
        Mode("eager-stock", "eager", is_raw=True, is_stock=True),
        Mode("graph-stock", "graph", is_raw=True, is_stock=True),
    )
}


def find_mode(name: str) -> Mode:
    """The mode of a name; `UserError` with the names there are."""
    found = MODES.get(name) or {mode.name: mode for mode in (GEMM, PERTURBED)}.get(name)
    if found is None:
        raise UserError(f"--modes names {name!r}, and there is no such mode. There are: {', '.join(MODES)}.")
    return found


@dataclass(frozen=True)
class VariantSpec:
    """One variant of a case.

    name: unique in its case. command, environment: how to start it. `{folder}` in the command becomes its scratch
    folder. twin_of: the variant that this one repeats, to find the noise. A peak has no loss.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    mode: str = "command"
    processes: int = 1
    twin_of: str | None = None
    is_peak: bool = False


@dataclass(frozen=True)
class Case:
    """Variants that are measured interleaved.

    overrides: what the user changed, without what every case sets. probes: started only where losses diverge, to find
    out how far a change in the last bit of the weights makes them diverge.
    """

    config: str
    overrides: tuple[str, ...]
    variants: tuple[VariantSpec, ...]
    probes: tuple[VariantSpec, ...] = ()

    @property
    def title(self) -> str:
        """`configs/gpt_stdlib.py model.num_layers=2`."""
        return " ".join(map(without_folders, [self.config, *self.overrides]))


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    commands: name → command line of a variant of the user.
    """

    configs: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager", "graph", "raw-eager", "raw-graph")
    processes: tuple[int, ...] = (1,)
    scaling: str = "weak"
    peak: bool = True
    twin: bool = True
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def make_cases(request: Request) -> list[Case]:
    """All cases, checked: a mistake in a config or an override is found before anything starts."""
    for what, given in (("--modes", request.modes), ("--procs", request.processes)):
        if not given or len(set(given)) != len(given):
            raise UserError(f"{what} {','.join(map(str, given))}: name at least one, and each once.")
    return [_make_case(request, config) for config in request.configs]


def without_folders(word: str) -> str:
    """A word of a command line as it may stand in a report: an absolute path keeps its last part only."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}.../{Path(value).name}" if os.path.isabs(value) else word


def _make_case(request: Request, config: str) -> Case:
    overrides = request.overrides
    variants: list[VariantSpec] = []
    probes: list[VariantSpec] = []
    for count in request.processes:
        *own, probe = _variants_of(request, config, overrides, count)
        variants += own
        probes.append(probe)
    environment = _environment_of_command()
    for name, command in request.commands.items():
        variants.append(VariantSpec(name, (*command, config, *overrides, *MEASURED_TRAINING), environment))
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise UserError(f"two variants have one name: {', '.join(names)}. Give --variant another name.")
    path = Path(config).resolve()
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else without_folders(config)
    return Case(shown, overrides, tuple(variants), tuple(probes))


def _environment_of_command() -> dict[str, str]:
    """Variables with which any program can import the protocol, and `python` is the interpreter that runs this."""
    found = {"PYTHONPATH": ROOT, "PATH": str(Path(sys.executable).parent)}
    return {name: os.pathsep.join([first, *filter(None, [os.environ.get(name)])]) for name, first in found.items()}


def _variants_of(request: Request, config: str, overrides: tuple[str, ...], count: int) -> list[VariantSpec]:
    """All variants of `count` processes, and the probe last."""
    suffix = "" if request.processes == (1,) else f" x{count}"
    if request.scaling == "strong" and count > 1:
        overrides = (*overrides, *_same_global_batch(config, overrides))
    settings = (*overrides, *MEASURED_TRAINING)
    device = load_config(config, settings, count).train.device

    def spec(mode: Mode, name: str, **fields: Any) -> VariantSpec:
        command = [*LAUNCH, "libai.cli.commands.benchmark", config, str(count)]
        command += [*settings, "train.output_dir={folder}/run"]
        if mode.base != "gemm":
            command.append(f"graph.enabled={str(mode.base == 'graph').lower()}")
        command += ["--worker", mode.name, "--folder", "{folder}"]
        return VariantSpec(name, tuple(command), mode.environment(device, os.environ), mode.name, count, **fields)

    modes = [find_mode(name) for name in request.modes]
    found = [spec(mode, mode.name + suffix) for mode in modes]
    if request.twin:
        found.append(spec(modes[0], f"{found[0].name} (again)", twin_of=found[0].name))
    if request.peak:
        found.append(spec(GEMM, f"gemm{suffix}", is_peak=True))
    return [*found, spec(PERTURBED, f"perturbed{suffix}")]


def _same_global_batch(config: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides that keep the global batch of one process, so that the micro-batch of several shrinks."""
    sizes = batch_sizes_of(load_config(config, overrides, 1).train, 1)
    return (
        "train.train_micro_batch_size=null",
        f"train.global_batch_size={sizes.global_}",
        f"train.num_accumulation_steps={sizes.accumulation}",
    )
