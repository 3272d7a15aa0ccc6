"""Train a config once for each combination of values: `libai sweep CONFIG optim.lr=1e-3,3e-3 train.seed=range(0,3)`.

Values are written in Hydra's grammar: `a,b`, `choice(a,b)`, `range(start,stop,step)`; what has one value is set in
every run. Each run has a folder of its own below --output. The same command again trains what is missing: finished runs
stay, others continue from their newest checkpoint.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai.cli.commands.runs.drawing import draw_curves
from libai.cli.commands.runs.records import Record, format_table, read_record, show
from libai.cli.parser import Parser
from libai.cli.training import check_processes
from libai.launch.installation import LIBAI
from libai.launch.request import find_config
from libai.utils.errors import UserError
from libai.utils.screen import say

_LONGEST_NAME = 120


@dataclass(frozen=True)
class Trial:
    """One combination: `values` by key, and all words of its command line but the folder."""

    folder: Path
    values: dict[str, str]
    words: tuple[str, ...]

    @property
    def record(self) -> Record | None:
        """What it has left; None before it began."""
        return read_record(self.folder) if (self.folder / "config.yaml").is_file() else None

    @property
    def status(self) -> str:
        """`finished`, how else it ended, or `not run`."""
        return "not run" if (record := self.record) is None else record.status


class Jobs:
    """Trainings in processes of their own, which end with this one."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_stopping = False

    def train(self, config: str, trial: Trial, processes: str) -> int:
        """Run one training to its end, with its output in `trial.folder`.log; its exit code."""
        continues = trial.record is not None and any((trial.folder / "checkpoints").glob("iter_*"))
        words = [config, "-n", processes, *trial.words, f"train.output_dir='{trial.folder}'"]
        with open(trial.folder.with_name(f"{trial.folder.name}.log"), "ab") as log:
            with self._lock:
                if self._is_stopping:
                    return 1
                command = [*LIBAI, "train", *words, *(["--resume"] if continues else [])]
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code

    def stop(self) -> None:
        """Ask all trainings to save and end, and start no others."""
        with self._lock:
            self._is_stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code: 0 when every run is finished."""
    args, words = build_parser().parse_known_args(arguments)
    config = find_config(args.config)
    check_processes(args.procs)
    overrides = [word for word in words if not word.startswith("-")]
    flags = [word for word in words if word.startswith("-")]
    if own := next((word for word in words if word.startswith(("--resume", "train.output_dir="))), None):
        raise UserError(
            f"{own}: a sweep gives each run a folder below --output, and continues what is there by itself."
        )
    root = args.output or Path("out") / f"{Path(config).stem}_sweep"
    trials = [
        Trial(root.absolute() / name_of(values), values, (*(f"{k}={v}" for k, v in values.items()), *fixed, *flags))
        for values, fixed in combinations_of(overrides)
    ]
    for trial in trials:
        check(config, trial, args.procs)
    if args.list:
        print("\n".join(f"{trial.status:<12} {trial.folder.name}" for trial in trials))
        return 0
    root.mkdir(parents=True, exist_ok=True)
    train_all(config, trials, args.jobs, args.procs)
    rows = table_of(trials, args.tag)
    print(format_table(rows[0], rows[1:]))
    with open(root / "sweep.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    _draw(root, trials, args.tag)
    failed = [trial for trial in trials if trial.status != "finished"]
    for trial in failed:
        print(f"{trial.status}: {trial.folder}.log")
    return 1 if failed else 0


def build_parser() -> Parser:
    """The command line; other flags go to each training."""
    parser = Parser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a file, or the name of a shipped config")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="trainings at a time (default 1)")
    parser.add_argument("--procs", "-n", default="1", help="processes of each training (default 1)")
    parser.add_argument("--output", "-o", type=Path, help="folder of the sweep (default out/CONFIG_sweep)")
    parser.add_argument("--tag", action="append", help="metric of the table and the curves; may be given again")
    parser.add_argument("--list", action="store_true", help="list the runs and how each ended, and stop")
    return parser


def combinations_of(overrides: Sequence[str]) -> list[tuple[dict[str, str], list[str]]]:
    """For each combination its values by key, and the overrides that all have. Raises `UserError` where no key has
    several values, or one has a range without steps."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    swept: dict[str, list[str]] = {}
    fixed = []
    for word in overrides:
        try:
            parsed = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise UserError(f"{word}: cannot be read ({str(error).splitlines()[0]}).") from None
        if not parsed.is_sweep_override():
            fixed.append(word)
        elif not parsed.is_discrete_sweep():
            raise UserError(f"{word}: it has no end of values. Write range(start,stop,step) or the values themselves.")
        else:
            swept[parsed.get_key_element()] = [str(value) for value in parsed.sweep_string_iterator()]
    if not swept:
        raise UserError(
            "no setting has several values, such as optim.lr=1e-3,3e-3. For one run there is `libai train`."
        )
    return [(dict(zip(swept, values)), fixed) for values in itertools.product(*swept.values())]


def name_of(values: dict[str, str]) -> str:
    """The folder of a combination: its values, in letters that every file system takes; a long one ends in a hash."""
    text = ",".join(f"{key}={value}" for key, value in values.items())
    name = "".join(letter if letter.isalnum() or letter in "=,._+-" else "_" for letter in text)
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check(config: str, trial: Trial, processes: str) -> None:
    """Raise the `UserError` that the run would end with, before any run begins."""
    from libai.config import load_config, parse_args

    words = parse_args([config, *trial.words], prog="libai sweep")
    try:
        load_config(config, words.overrides, 1 if processes == "auto" else int(processes))
    except UserError as error:
        raise UserError(f"{trial.folder.name}: {error}") from None


def train_all(config: str, trials: Sequence[Trial], num_jobs: int, processes: str) -> None:
    """Train what is not finished, `num_jobs` at a time, a line for each that ends."""
    if num_jobs < 1:
        raise UserError(f"--jobs {num_jobs}: it must be at least 1.")
    waiting = [trial for trial in trials if trial.status != "finished"]
    if len(waiting) < len(trials):
        print(f"{len(trials) - len(waiting)} of {len(trials)} runs are finished already")
    if waiting:
        say(f"training {len(waiting)} runs, {num_jobs} at a time; each writes a .log beside its folder")
    jobs = Jobs()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(num_jobs) as pool:
            try:
                codes = [pool.submit(jobs.train, config, trial, processes) for trial in waiting]
                for trial, code in zip(waiting, codes):
                    end = f"failed ({code.result()})" if code.result() else "finished"
                    print(f"{end}: {trial.folder.name}", flush=True)
            except BaseException:
                say("stopping: the runs save and end; the same command continues them")
                jobs.stop()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def table_of(trials: Sequence[Trial], tags: Sequence[str] | None) -> list[list[str]]:
    """Header and a row for each run: its values, how it ended, and its last metrics."""
    records = [trial.record for trial in trials]
    metrics = [record.final_metrics if record else {} for record in records]
    known = dict.fromkeys(tag for found in metrics for tag in found)
    shown = list(tags or (tag for tag in known if tag == "train/loss" or tag.startswith("eval/")))
    rows: list[list[str]] = [[*trials[0].values, "status", *shown]]
    for trial, found in zip(trials, metrics):
        cells: list[Any] = [show(found[tag]) if tag in found else "-" for tag in shown]
        rows.append([*trial.values.values(), trial.status, *cells])
    return rows


def _draw(root: Path, trials: Sequence[Trial], tags: Sequence[str] | None) -> None:
    import importlib.util

    curves = {trial.folder.name: record.curves for trial in trials if (record := trial.record)}
    shown = [tag for tag in tags or ["train/loss"] if any(tag in found for found in curves.values())]
    if shown and importlib.util.find_spec("matplotlib") is not None:
        draw_curves(curves, shown, root / "curves.svg")
        print(f"curves: {root / 'curves.svg'}")
