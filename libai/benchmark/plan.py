"""What a benchmark measures: cases (a config with overrides) and, in each, the contenders that take turns."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libai.benchmark.modes import GEMM, NUDGED, Mode, find_mode
from libai.config import LazyConfig, solve_batch_sizes, validate
from libai.utils.errors import UserError

#: a constant rate, which a stock graph needs, and nothing in the loop but training
MEASURED_TRAINING = (
    "lr_scheduler=null",
    "train.scheduler=null",
    "train.warmup_ratio=0",
    "train.train_iter=1000000",
    "train.train_epoch=0",
    "train.evaluation.enabled=false",
    "train.checkpointer.enabled=false",
    "train.max_seconds=null",
)


@dataclass(frozen=True)
class Sweep:
    """A setting and the values that it takes, one case each: `--sweep model.num_layers=2,4,8`."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From `key=v1,v2,...`; `UserError` otherwise."""
        key, equals, values = text.partition("=")
        parts = tuple(value.strip() for value in values.split(","))
        if not (key and equals and all(parts)):
            raise UserError(f"--sweep {text}: write KEY=V1,V2,..., such as --sweep model.num_layers=2,4,8.")
        if len(set(parts)) != len(parts):
            raise UserError(f"--sweep {text} names a value twice. Every value is one case; name it once.")
        return cls(key, parts)


@dataclass(frozen=True)
class Entry:
    """One contender of a case.

    name: unique in its case. command, environment: how to start it. `{folder}` in the command becomes its scratch
    folder. twin_of: the contender that this one repeats, to find the noise. Peak contenders have no loss.
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
    """Contenders that are measured in turns.

    overrides: what the user changed, without what every case sets. probes: started only where losses part, to find out
    how much a change in the last bit of the weights parts them.
    """

    config: str
    overrides: tuple[str, ...]
    entries: tuple[Entry, ...]
    sweep_key: str | None = None
    sweep_value: str | None = None
    probes: tuple[Entry, ...] = ()

    @property
    def title(self) -> str:
        """`configs/gpt_stdlib.py model.num_layers=2`."""
        return " ".join(map(without_folders, [self.config, *self.overrides]))


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    tool: absolute path of tools/benchmark.py, which is also the file of every rank; the launcher lies beside it.
    contenders: name -> command line of contenders that are no config of ours.
    """

    tool: Path
    configs: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager", "graph", "raw-eager", "raw-graph")
    processes: tuple[int, ...] = (1,)
    sweep: Sweep | None = None
    scaling: str = "weak"
    peak: bool = True
    twin: bool = True
    contenders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def plan_cases(wanted: Wanted) -> list[Case]:
    """All cases, checked: a mistake in a config or an override is found before anything starts."""
    modes = [find_mode(name) for name in wanted.modes]
    for what, given in (("--modes", wanted.modes), ("--procs", wanted.processes)):
        if not given or len(set(given)) != len(given):
            raise UserError(f"{what} {','.join(map(str, given))}: name at least one, and each once.")
    values = wanted.sweep.values if wanted.sweep else (None,)
    cases = []
    for config, value in itertools.product(wanted.configs, values):
        swept = () if value is None or wanted.sweep is None else (f"{wanted.sweep.key}={value}",)
        overrides = (*wanted.overrides, *swept)
        entries: list[Entry] = []
        probes: list[Entry] = []
        for count in wanted.processes:
            *own, probe = _entries(wanted, config, overrides, modes, count)
            entries += own
            probes.append(probe)
        entries += [
            Entry(name, (*command, config, *overrides, *MEASURED_TRAINING), _environment_of_command(wanted.tool))
            for name, command in wanted.contenders.items()
        ]
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            raise UserError(f"two contenders have one name: {', '.join(names)}. Give --contender another name.")
        cases.append(
            Case(
                _shown(config, wanted.tool),
                overrides,
                tuple(entries),
                wanted.sweep.key if wanted.sweep else None,
                value,
                tuple(probes),
            )
        )
    return cases


def _environment_of_command(tool: Path) -> dict[str, str]:
    """So that any program can import the protocol, and `python` is the interpreter with OneFlow that runs this."""
    found = {"PYTHONPATH": str(tool.parent.parent), "PATH": str(Path(sys.executable).parent)}
    return {name: os.pathsep.join([first, *filter(None, [os.environ.get(name)])]) for name, first in found.items()}


def without_folders(word: str) -> str:
    """A word of a command line as it may stand in a report: an absolute path keeps its last part only."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}.../{Path(value).name}" if os.path.isabs(value) else word


def _shown(config: str, tool: Path) -> str:
    """The path of a config in a report: relative to the repository where it lies in it."""
    path, root = Path(config).resolve(), tool.parent.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else without_folders(config)


def checkpoint_case(tool: Path) -> Case:
    """A GPT of 50 million weights, 0.6 GB with its optimizer, trained eagerly: what a checkpoint costs it."""
    overrides = (
        *("model.hidden_size=512", "model.num_layers=16", "model.num_heads=8", "train.train_micro_batch_size=4"),
        "optim.lr=1e-4",
    )
    config = str(tool.parent.parent / "configs" / "gpt_stdlib.py")
    wanted = Wanted(tool, (config,), overrides, modes=("eager",), peak=False, twin=False)
    (case,) = plan_cases(wanted)
    return case


def _entries(wanted: Wanted, config: str, overrides: tuple[str, ...], modes: Sequence[Mode], count: int) -> list[Entry]:
    """All contenders of `count` processes, and the probe last."""
    suffix = "" if len(wanted.processes) == 1 and count == 1 else f" x{count}"
    overrides = (*overrides, *_batch_overrides(config, overrides, wanted.scaling, count))
    device = _check(config, (*overrides, *MEASURED_TRAINING), count)

    def entry(mode: Mode, name: str, **fields: Any) -> Entry:
        command = [sys.executable, str(wanted.tool.parent / "launch.py"), str(wanted.tool), config, str(count)]
        command += [*overrides, *MEASURED_TRAINING, "train.output_dir={folder}/run"]
        if mode.base != "gemm":
            command.append(f"graph.enabled={str(mode.base == 'graph').lower()}")
        command += ["--worker", mode.name, "--folder", "{folder}"]
        environment = mode.environment(device, os.environ)
        return Entry(name, tuple(command), environment, mode.name, count, **fields)

    entries = [entry(mode, mode.name + suffix) for mode in modes]
    if wanted.twin:
        first = modes[0]
        entries.append(entry(first, f"{first.name}{suffix} (again)", twin_of=f"{first.name}{suffix}"))
    if wanted.peak:
        entries.append(entry(GEMM, f"gemm{suffix}", is_peak=True))
    return [*entries, entry(NUDGED, f"nudged{suffix}")]


def _batch_overrides(config: str, overrides: tuple[str, ...], scaling: str, count: int) -> tuple[str, ...]:
    """With strong scaling the global batch stays that of one process, and the micro-batch shrinks."""
    if scaling == "weak" or count == 1:
        return ()
    run: Any = validate(LazyConfig.apply_overrides(LazyConfig.load(config), list(overrides)), 1)
    train = run.train
    sizes = solve_batch_sizes(train.train_micro_batch_size, train.global_batch_size, train.num_accumulation_steps, 1)
    return (
        "train.train_micro_batch_size=null",
        f"train.global_batch_size={sizes.global_}",
        f"train.num_accumulation_steps={sizes.accumulation}",
    )


def _check(config: str, overrides: tuple[str, ...], count: int) -> str:
    run: Any = validate(LazyConfig.apply_overrides(LazyConfig.load(config), list(overrides)), count)
    return run.train.device
