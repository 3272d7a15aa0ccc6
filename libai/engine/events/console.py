"""The numbers of a run on the screen and in `log.txt`: one line per log point, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from libai.engine.events.writers import LogRecord, Writer
from libai.utils.logging import is_quiet
from libai.utils.rank_notes import own_progress
from libai.utils.screen import is_terminal

logger = logging.getLogger("libai.engine")

#: what a line for a narrow terminal leaves out, in this order, until it fits; the bar, `log.txt` and `metrics.jsonl`
#: have all of it
_LEFT_OUT = ("mem", "data", "step", "rate", "grad", "eta", "own", "lr")
#: what the bar says a process is at, by phase of `libai.utils.rank_notes`
_AT = {"compile": "compiling", "evaluate": "evaluating", "save": "saving", "load": "loading", "build": "building"}
#: a frame of the bar takes about a millisecond of the interpreter
_FRAMES_PER_SECOND = 3


class ConsoleWriter(Writer):
    """One line per log point through the logger (screen and `log.txt`); on a terminal a progress bar below the lines.

    The bar moves by itself between log points and tells of compiling, evaluating and saving.

    Args:
        progress_bar: None decides by whether standard output is a terminal, and not a quiet one.
        max_iter: the last iteration, for a bar that is seen before the first record.
    """

    def __init__(self, progress_bar: bool | None = None, max_iter: int | None = None):
        self._wants_bar = is_terminal(sys.stdout) and not is_quiet() if progress_bar is None else progress_bar
        self._max_iter = max_iter
        self._bar: Any = None
        self._left_out: set[str] = set()

    def begin(self, start_iter: int = 0) -> None:
        if self._max_iter is not None and start_iter < self._max_iter:
            self._show_bar(self._max_iter)

    def write(self, record: LogRecord) -> None:
        if record.kind == "train" and any(tag.startswith("train/") for tag in record.scalars):
            short = partial(format_train_line, record, left_out=self._left_out)
            logger.info("%s", format_train_line(record), extra={"at_width": short})
            fields = _train_fields(record)
            numbers = [fields[name] for name in ("loss", "rate", "eta") if name in fields]
            self._show_bar(record.max_iter, logged=record.iter, numbers="  ".join(numbers))
        for line in format_eval_lines(record):
            logger.info("%s", line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, max_iter: int, **fields: Any) -> None:
        if not self._wants_bar:
            return
        if self._bar is None:
            self._bar = _build_bar(max_iter)
            self._bar.start()
        self._bar.update(0, total=max_iter, **fields)


@contextmanager
def bar_while_preparing(max_iter: int) -> Iterator[None]:
    """Show the bar, on a terminal, while the block prepares training, such as compiling. Rank 0 only."""
    console = ConsoleWriter(max_iter=max_iter)
    console.begin()
    try:
        yield
    finally:
        console.close()


def _build_bar(max_iter: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    class Bar(Progress):
        def get_renderables(self) -> Any:
            """One frame: where the process is now."""
            now = own_progress()
            for task in self.tasks:  # none while it is made
                completed = max(now.iteration, task.fields["logged"])
                self.update(task.id, completed=completed, description=_AT.get(now.phase, "train"))
            yield from super().get_renderables()

    class CursorStays(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Nothing: a process that is killed could not bring the cursor back."""
            return False

    bar = Bar(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"),
        console=CursorStays(soft_wrap=True),  # log lines pass through it, folded already
        refresh_per_second=_FRAMES_PER_SECOND,
        transient=True,
    )
    bar.add_task("train", total=max_iter, numbers="", logged=0)
    return bar


def format_train_line(record: LogRecord, width: int | None = None, left_out: set[str] | None = None) -> str:
    """`iter     20/200  epoch 0.40  loss 4.8249  lr 6.00e-04  4,812 tok/s  213.1 ms/step  data 0.4%  eta 0:00:22`.

    What a record does not hold is left out, and with `width` what does not fit: it is added to `left_out`, whose fields
    the next line leaves out as well. `eta` counts the remaining iterations at the present time per iteration.
    """
    fields = {"iter": f"iter {record.iter:>6}/{record.max_iter}", **_train_fields(record)}
    left_out = set() if left_out is None else left_out
    for kind in _LEFT_OUT if width else ():
        for name in [name for name in reversed(fields) if name.partition(" ")[0] == kind]:
            if name in left_out or len("  ".join(fields.values())) > (width or 0):
                left_out.add(name)
                del fields[name]
    return "  ".join(fields.values())


def _train_fields(record: LogRecord) -> dict[str, str]:
    """Texts by what they tell, in their order on the line; "own NAME" for a further loss or metric of the model."""
    numbers = record.scalars
    fields = {"epoch": f"epoch {numbers['train/epoch']:.2f}"} if "train/epoch" in numbers else {}
    if "train/loss" in numbers:
        fields["loss"] = f"loss {numbers['train/loss']:.4f}"
    for tag, value in numbers.items():
        name = tag.removeprefix("train/")
        is_own = tag.startswith("train/") and name not in ("loss", "lr", "grad_norm", "epoch")
        if is_own and value != numbers.get("train/loss"):  # a single loss would be shown twice
            fields[f"own {name}"] = f"{name} {value:.4g}"
    if "train/lr" in numbers:
        fields["lr"] = f"lr {numbers['train/lr']:.2e}"
    if "train/grad_norm" in numbers:
        fields["grad"] = f"grad {numbers['train/grad_norm']:.3g}"
    if "perf/tokens_per_s" in numbers:
        fields["rate"] = f"{_rate(numbers['perf/tokens_per_s'])} tok/s"
    elif "perf/samples_per_s" in numbers:
        fields["rate"] = f"{_rate(numbers['perf/samples_per_s'])} samples/s"
    step_ms = numbers.get("perf/step_ms")
    if step_ms is not None:
        fields["step"] = f"{step_ms:.1f} ms/step" if step_ms >= 10 else f"{step_ms:.3g} ms/step"
        if "perf/data_ms" in numbers and step_ms > 0:
            fields["data"] = f"data {min(1.0, numbers['perf/data_ms'] / step_ms):.1%}"
    if "perf/mem_gb" in numbers:
        fields["mem"] = f"mem {numbers['perf/mem_gb']:.1f} GB"
    if step_ms is not None and math.isfinite(step_ms):
        fields["eta"] = f"eta {timedelta(seconds=round((record.max_iter - record.iter) * step_ms / 1e3))}"
    return fields


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}"


def format_eval_lines(record: LogRecord) -> list[str]:
    """One line per dataset: `eval val  loss 2.351  ppl 10.5  (iter 200, 1.2 s)`. Empty without `eval/` tags."""
    datasets: dict[str, list[str]] = {}
    for tag, value in record.scalars.items():
        if tag.startswith("eval/"):
            dataset, _, metric = tag.removeprefix("eval/").rpartition("/")
            datasets.setdefault(dataset or "all", []).append(f"{metric} {_metric(value)}")
    took = "" if record.seconds is None else f", {_duration(record.seconds)}"
    if len(datasets) > 1 and took:
        took += " in all"
    return [f"eval {name}  {'  '.join(fields)}  (iter {record.iter}{took})" for name, fields in datasets.items()]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"


def _metric(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
