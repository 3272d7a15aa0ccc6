"""What a benchmark measures: cases (a config with overrides) and, in each, the variants that are interleaved.

Imports no oneflow.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libai.config import batch_sizes_of, load_config
from libai.launch.installation import LAUNCH, shipped_config
from libai.utils.errors import UserError

#: a constant learning rate, which a stock graph needs, and nothing in the loop but training
MEASURED_TRAINING = (
    *("lr_scheduler=null", "train.scheduler=null", "train.warmup_ratio=0"),
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
    sweep_key: str | None = None
    sweep_value: str | None = None
    probes: tuple[VariantSpec, ...] = ()

    @property
    def title(self) -> str:
        """`configs/gpt_stdlib.py model.num_layers=2`."""
        return " ".join(map(without_folders, [self.config, *self.overrides]))


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    tool: absolute path of tools/benchmark.py.
    sweep: a setting and its values, one case each. commands: name → command line of a variant of the user.
    """

    tool: Path
    configs: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager", "graph", "raw-eager", "raw-graph")
    processes: tuple[int, ...] = (1,)
    sweep: tuple[str, tuple[str, ...]] | None = None
    scaling: str = "weak"
    peak: bool = True
    twin: bool = True
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """The setting and its values in `key=v1,v2,...`; `UserError` otherwise."""
    key, equals, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(","))
    if not (key and equals and all(parts)):
        raise UserError(f"--sweep {text}: write KEY=V1,V2,..., such as --sweep model.num_layers=2,4,8.")
    if len(set(parts)) != len(parts):
        raise UserError(f"--sweep {text} names a value twice. Every value is one case; name it once.")
    return key, parts


def make_cases(request: Request) -> list[Case]:
    """All cases, checked: a mistake in a config or an override is found before anything starts."""
    for what, given in (("--modes", request.modes), ("--procs", request.processes)):
        if not given or len(set(given)) != len(given):
            raise UserError(f"{what} {','.join(map(str, given))}: name at least one, and each once.")
    key, values = request.sweep or (None, (None,))
    return [_make_case(request, config, key, value) for config, value in itertools.product(request.configs, values)]


def checkpoint_case(tool: Path) -> Case:
    """A GPT of 50 million weights, 0.6 GB with its optimizer, trained eagerly: what a checkpoint costs it."""
    config = str(shipped_config("gpt_stdlib"))
    size = ("model.hidden_size=512", "model.num_layers=16", "model.num_heads=8", "train.train_micro_batch_size=4")
    request = Request(tool, (config,), (*size, "optim.lr=1e-4"), modes=("eager",), peak=False, twin=False)
    (case,) = make_cases(request)
    return case


def without_folders(word: str) -> str:
    """A word of a command line as it may stand in a report: an absolute path keeps its last part only."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}.../{Path(value).name}" if os.path.isabs(value) else word


def _make_case(request: Request, config: str, key: str | None, value: str | None) -> Case:
    overrides = request.overrides if key is None else (*request.overrides, f"{key}={value}")
    variants: list[VariantSpec] = []
    probes: list[VariantSpec] = []
    for count in request.processes:
        *own, probe = _variants_of(request, config, overrides, count)
        variants += own
        probes.append(probe)
    environment = _environment_of_command(request.tool)
    for name, command in request.commands.items():
        variants.append(VariantSpec(name, (*command, config, *overrides, *MEASURED_TRAINING), environment))
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise UserError(f"two variants have one name: {', '.join(names)}. Give --variant another name.")
    path, root = Path(config).resolve(), request.tool.parent.parent
    shown = str(path.relative_to(root)) if path.is_relative_to(root) else without_folders(config)
    return Case(shown, overrides, tuple(variants), key, value, tuple(probes))


def _environment_of_command(tool: Path) -> dict[str, str]:
    """So that any program can import the protocol, and `python` is the interpreter with OneFlow that runs this."""
    found = {"PYTHONPATH": str(tool.parent.parent), "PATH": str(Path(sys.executable).parent)}
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
