"""The numbers of a run on the screen and in `log.txt`: one line per log point, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import math
import sys
from datetime import timedelta
from typing import Any

from libai.engine.events.writers import LogRecord, Writer
from libai.utils.logging import is_quiet
from libai.utils.rank_notes import own_progress
from libai.utils.screen import is_terminal

logger = logging.getLogger("libai.engine")

#: phase of `libai.utils.rank_notes` → the word for it in the bar
_AT = {"compile": "compiling", "evaluate": "evaluating", "save": "saving", "load": "loading", "build": "building"}
#: a frame of the bar takes about a millisecond of the interpreter
_FRAMES_PER_SECOND = 3


class ConsoleWriter(Writer):
    """One line per log point through the logger (screen and `log.txt`); on a terminal a progress bar below the lines.

    The bar moves by itself between log points and shows when the run compiles, evaluates or saves. `max_iter`: the last
    iteration, for a bar that is seen before the first record.
    """

    def __init__(self, max_iter: int | None = None):
        self._max_iter = max_iter
        self._bar: Any = None

    def begin(self, start_iter: int = 0) -> None:
        if self._max_iter is not None and start_iter < self._max_iter:
            self._show_bar(self._max_iter)

    def write(self, record: LogRecord) -> None:
        if record.kind == "train" and any(tag.startswith("train/") for tag in record.scalars):
            logger.info("%s", format_train_line(record))
            numbers = "  ".join(text for kind, text in _train_fields(record) if kind in ("loss", "rate", "eta"))
            self._show_bar(record.max_iter, logged=record.iter, numbers=numbers)
        for line in format_eval_lines(record):
            logger.info("%s", line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, max_iter: int, **fields: Any) -> None:
        if not is_terminal(sys.stdout) or is_quiet():
            return
        if self._bar is None:
            self._bar = _build_bar(max_iter)
            self._bar.start()
        self._bar.update(0, total=max_iter, **fields)


def _build_bar(max_iter: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    class Bar(Progress):
        def get_renderables(self) -> Any:
            """One frame: where the process is now."""
            phase, iteration = own_progress()
            for task in self.tasks:  # none while it is made
                completed = max(iteration, task.fields["logged"])
                self.update(task.id, completed=completed, description=_AT.get(phase, "train"))
            yield from super().get_renderables()

    class CursorStays(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Nothing: a process that is killed could not bring the cursor back."""
            return False

    bar = Bar(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"),
        console=CursorStays(soft_wrap=True),  # log lines pass through it
        refresh_per_second=_FRAMES_PER_SECOND,
        transient=True,
    )
    bar.add_task("train", total=max_iter, numbers="", logged=0)
    return bar


def format_train_line(record: LogRecord) -> str:
    """`iter     20/200  epoch 0.40  loss 4.8249  lr 6.00e-04  4,812 tok/s  213 ms/step  data 0.4%  eta 0:00:22`.

    What a record does not hold is left out. `eta` counts the remaining iterations at the present time per iteration.
    """
    return "  ".join([f"iter {record.iter:>6}/{record.max_iter}", *(text for _, text in _train_fields(record))])


def _train_fields(record: LogRecord) -> list[tuple[str, str]]:
    """Kinds and texts of what the record holds, in their order on the line."""
    numbers = record.scalars
    fields: list[tuple[str, str]] = []

    def add(kind: str, tag: str, text: str) -> None:
        if tag in numbers:
            fields.append((kind, text.format(numbers[tag])))

    add("epoch", "train/epoch", "epoch {:.2f}")
    add("loss", "train/loss", "loss {:.4f}")
    for tag, value in numbers.items():
        is_own = tag.startswith("train/") and tag not in ("train/loss", "train/lr", "train/grad_norm", "train/epoch")
        if is_own and value != numbers.get("train/loss"):  # a single loss would be shown twice
            fields.append(("own", f"{tag.removeprefix('train/')} {value:.4g}"))
    add("lr", "train/lr", "lr {:.2e}")
    add("grad", "train/grad_norm", "grad {:.3g}")
    for tag, unit in (("perf/tokens_per_s", "tok/s"), ("perf/samples_per_s", "samples/s")):
        if tag in numbers:
            fields.append(("rate", f"{_short(numbers[tag])} {unit}"))
            break
    step_ms = numbers.get("perf/step_ms")
    if step_ms is not None:
        fields.append(("step", f"{_short(step_ms)} ms/step"))
        if "perf/data_ms" in numbers and step_ms > 0:
            fields.append(("data", f"data {min(1.0, numbers['perf/data_ms'] / step_ms):.1%}"))
    add("mem", "perf/mem_gb", "mem {:.1f} GB")
    if step_ms is not None and math.isfinite(step_ms):
        seconds_left = round((record.max_iter - record.iter) * step_ms / 1e3)
        fields.append(("eta", f"eta {timedelta(seconds=seconds_left)}"))
    return fields


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_eval_lines(record: LogRecord) -> list[str]:
    """One line per dataset: `eval val  loss 2.351  ppl 10.5  (iter 200, 1.2 s)`. Empty without `eval/` tags."""
    datasets: dict[str, list[str]] = {}
    for tag, value in record.scalars.items():
        if tag.startswith("eval/"):
            dataset, _, metric = tag.removeprefix("eval/").rpartition("/")
            datasets.setdefault(dataset or "all", []).append(f"{metric} {_metric(value)}")
    took = ""
    if record.seconds is not None:
        took = f", {record.seconds:.1f} s" if record.seconds >= 0.1 else f", {record.seconds * 1e3:.0f} ms"
        took += " in all" if len(datasets) > 1 else ""
    return [f"eval {name}  {'  '.join(fields)}  (iter {record.iter}{took})" for name, fields in datasets.items()]


def _metric(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
