"""The numbers of a run on the screen and in `log.txt`: one line per log point, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import math
import sys
from datetime import timedelta
from typing import Any

from libai.engine.log.writers import LogRecord, Writer

logger = logging.getLogger("libai.engine")


class ConsoleWriter(Writer):
    """One line per log point through the logger (screen and `log.txt`); on a terminal a progress bar below the lines.

    Args:
        progress_bar: None decides by whether standard output is a terminal.
    """

    def __init__(self, progress_bar: bool | None = None):
        self._wants_bar = sys.stdout.isatty() if progress_bar is None else progress_bar
        self._bar: Any = None

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`."""
        if record.kind == "train" and any(tag.startswith("train/") for tag in record.scalars):
            logger.info("%s", format_train_line(record))
            self._update_bar(record)
        for line in format_eval_lines(record):
            logger.info("%s", line)

    def close(self) -> None:
        """See `Writer.close`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update_bar(self, record: LogRecord) -> None:
        if not self._wants_bar:
            return
        if self._bar is None:
            self._bar = _build_bar(record.max_iter)
        # the line above has everything; the bar keeps what one glances at, short enough for a narrow terminal
        fields = [
            field
            for field in _train_fields(record)
            if field.startswith(("epoch", "loss", "eta")) or field.endswith("/s")
        ]
        self._bar.update(0, completed=record.iter, numbers="  ".join(fields), refresh=True)


def _build_bar(max_iter: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("train"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"),
        console=Console(soft_wrap=True),  # log lines pass through this console: leave wrapping to the terminal
        auto_refresh=False,  # drawn at log points; a thread of its own would take time from training
        transient=True,
    )
    bar.add_task("train", total=max_iter, numbers="")
    bar.start()
    return bar


def format_train_line(record: LogRecord) -> str:
    """`iter     20/200  epoch 0.40  loss 4.8249  lr 6.00e-04  4,812 tok/s  213.1 ms/step  data 0.4%  eta 0:00:22`.

    What a record does not hold is left out. `eta` counts the remaining iterations at the present time per iteration.
    """
    return "  ".join([f"iter {record.iter:>6}/{record.max_iter}", *_train_fields(record)])


def _train_fields(record: LogRecord) -> list[str]:
    numbers = record.scalars
    fields = [f"epoch {numbers['train/epoch']:.2f}"] if "train/epoch" in numbers else []
    if "train/loss" in numbers:
        fields.append(f"loss {numbers['train/loss']:.4f}")
    for tag, value in numbers.items():
        name = tag.removeprefix("train/")
        is_own = tag.startswith("train/") and name not in ("loss", "lr", "grad_norm", "epoch")
        if is_own and value != numbers.get("train/loss"):  # a single loss would be shown twice
            fields.append(f"{name} {value:.4g}")
    if "train/lr" in numbers:
        fields.append(f"lr {numbers['train/lr']:.2e}")
    if "train/grad_norm" in numbers:
        fields.append(f"grad {numbers['train/grad_norm']:.3g}")
    if "perf/tokens_per_s" in numbers:
        fields.append(f"{_rate(numbers['perf/tokens_per_s'])} tok/s")
    elif "perf/samples_per_s" in numbers:
        fields.append(f"{_rate(numbers['perf/samples_per_s'])} samples/s")
    step_ms = numbers.get("perf/step_ms")
    if step_ms is not None:
        fields.append(f"{step_ms:.1f} ms/step" if step_ms >= 10 else f"{step_ms:.3g} ms/step")
        if "perf/data_ms" in numbers and step_ms > 0:
            fields.append(f"data {min(1.0, numbers['perf/data_ms'] / step_ms):.1%}")
    if "perf/mem_gb" in numbers:
        fields.append(f"mem {numbers['perf/mem_gb']:.1f} GB")
    if step_ms is not None and math.isfinite(step_ms):
        fields.append(f"eta {timedelta(seconds=round((record.max_iter - record.iter) * step_ms / 1e3))}")
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
