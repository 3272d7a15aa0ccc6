"""Show the numbers of a run on screen and in `log.txt`: one line per log point, and a progress bar
on a terminal.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from datetime import timedelta
from statistics import median
from typing import Any

from libai.engine.events.writers import LogRecord, Writer
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import is_quiet
from libai.utils.rank_notes import own_progress
from libai.utils.screen import is_terminal

#: phase of `libai.utils.rank_notes` → its label in the progress bar
_AT = {
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "saving",
    "load": "loading",
    "build": "building",
}
#: frames of the progress bar per second; each takes about a millisecond of interpreter time
_FRAMES_PER_SECOND = 3
#: number of log points whose median step time gives the remaining time
_ETA_WINDOW = 10
#: tag of the duration of an evaluation
EVAL_SECONDS = "perf/eval_s"
#: key of the share of time spent waiting for data; not a tag
_DATA_SHARE = "data share"
#: tags with a fixed place on the line
_PLACED = ("train/loss", "train/lr", "train/grad_norm", "train/epoch")


class ConsoleWriter(Writer):
    """Writes one line per log point through the logger (screen and `log.txt`) and shows a progress
    bar on a terminal.

    The screen shows only the fields that fit into its width, and at most one line per
    `min_seconds`, but always the line of the last iteration. `log.txt` gets every line in full. The
    bar below the lines also moves between log points, and it shows when the run compiles, evaluates
    or saves.

    Args: max_iter: number of the last iteration, to show a bar before the first record; None: show
        it from then on. min_seconds: minimum number of seconds between two lines on the screen.
    """

    def __init__(self, max_iter: int | None = None, min_seconds: float = 1.0):
        self._max_iter = max_iter
        self._min_seconds = min_seconds
        self._shown_at = -math.inf
        self._step_ms: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._bar: Any = None

    def begin(self, start_iter: int = 0) -> None:
        if self._max_iter is not None and start_iter < self._max_iter:
            self._show_bar(self._max_iter, logged=start_iter)

    def write(self, record: LogRecord) -> None:
        if any(map(_is_of_training, record.scalars)):
            self._step_ms.append(record.scalars.get("perf/step_ms", math.nan))
            fields = train_fields(record, median(self._step_ms))
            numbers = "  ".join(fields[kind] for kind in ("loss", "rate", "eta") if kind in fields)
            self._show_bar(record.max_iter, logged=record.iter, numbers=numbers)
            logger.info(
                "%s",
                "  ".join(fields.values()),
                extra={"screen": self._screen_line(record, fields)},
            )
        for line in format_eval_lines(record):
            logger.info("%s", line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _screen_line(self, record: LogRecord, fields: dict[str, str]) -> str:
        now = time.monotonic()
        if now - self._shown_at < self._min_seconds and record.iter != record.max_iter:
            return ""
        self._shown_at = now
        return fit_rows(fields.values())[0]  # fields that do not fit are in `log.txt`

    def _show_bar(self, max_iter: int, **fields: Any) -> None:
        if not is_terminal(sys.stdout) or is_quiet():
            return
        if self._bar is None:
            self._bar = _build_bar(max_iter)
        self._bar.update(0, total=max_iter, **fields)
        # works only once; comes after the update, so that the first frame has its numbers
        self._bar.start()


def _build_bar(max_iter: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    class Bar(Progress):
        def get_renderable(self) -> Any:
            """Return an object that rich renders again for each log line, so the bar is never older
            than the line.
            """
            return self

        def __rich__(self) -> Any:
            """Return one frame with the current phase and iteration of the process."""
            phase, iteration = own_progress()
            (task,) = self.tasks
            completed = max(iteration, task.fields["logged"])
            self.update(task.id, completed=completed, description=_AT.get(phase, "train"))
            return self.make_tasks_table(self.tasks)

    class CursorStays(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Do nothing: a killed process could not restore a hidden cursor."""
            return False

    bar = Bar(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"),
        console=CursorStays(soft_wrap=True),  # log lines are printed through it
        refresh_per_second=_FRAMES_PER_SECOND,
        transient=True,
    )
    bar.add_task("train", total=max_iter, numbers="", logged=0)
    return bar


#: fields of a line: kind, tag, format; {0} is the number, {1} its short form, {2} the tag without
#: its prefix
_RATES = (
    ("rate", "perf/tokens_per_s", "{1} tok/s"),
    ("rate", "perf/samples_per_s", "{1} samples/s"),
)
_LAST_FIELDS = (
    ("step", "perf/step_ms", "{1} ms/step"),
    ("lr", "train/lr", "lr {0:.2e}"),
    ("grad", "train/grad_norm", "grad {0:.3g}"),
    ("epoch", "train/epoch", "epoch {0:.2f}"),
    ("data", _DATA_SHARE, "data {0:.1%}"),
    ("mem", "perf/mem_gb", "mem {0:.1f} GB"),
)


def train_fields(record: LogRecord, step_ms: float = math.nan) -> dict[str, str]:
    """Return the fields of a record by kind, most important first.

    Fields without a value in the record are left out.

    For example `iter  20/200  loss 4.8249  4,812 tok/s  eta 0:00:22  122 ms/step  lr 6.00e-04  grad
    0.9  epoch 0.4`. `step_ms`: expected time of each remaining iteration in ms.
    """
    numbers = dict(record.scalars)
    if numbers.get("perf/step_ms", 0) > 0 and "perf/data_ms" in numbers:
        numbers[_DATA_SHARE] = min(1.0, numbers["perf/data_ms"] / numbers["perf/step_ms"])
    single = numbers.get("train/loss", math.nan)  # the loss of the last iteration
    loss = single if record.mean_loss is None else record.mean_loss
    if "train/loss" in numbers:
        numbers["train/loss"] = loss
    is_plain = loss == 0 or 1e-3 <= abs(loss) < 1e6
    rows = [("loss", "train/loss", "loss {0:.4f}" if is_plain else "loss {0:.2e}"), *_RATES]
    for tag, value in record.scalars.items():
        is_own = _is_of_training(tag) and tag not in _PLACED
        if is_own and value != single:  # a single loss equals the total
            rows.append((tag, tag, "{2} {0:.4g}"))
    if (
        numbers.get(_DATA_SHARE, 0) >= 0.3
    ):  # waiting for data: more important than the fields after it
        rows.append(("data", _DATA_SHARE, "data {0:.1%}"))
    if math.isfinite(step_ms):
        remaining = timedelta(seconds=round((record.max_iter - record.iter) * step_ms / 1e3))
        rows.append(("eta", next(iter(numbers), ""), f"eta {remaining}"))
    fields = {"iter": f"iter {position(record.iter, record.max_iter)}"}
    for kind, tag, text in (*rows, *_LAST_FIELDS):
        if tag in numbers:
            fields.setdefault(
                kind, text.format(numbers[tag], _short(numbers[tag]), tag.removeprefix("train/"))
            )
    return fields


def fit_rows(fields: Iterable[str]) -> list[str]:
    """Join `fields` into rows that are at most as wide as the screen, unless a single field is
    wider.
    """
    first, *others = fields
    rows = [first]
    for field in others:
        if len(rows[-1]) + 2 + len(field) > shutil.get_terminal_size().columns:
            rows.append("")
        rows[-1] += f"  {field}"
    return rows


def position(iteration: int, max_iter: int) -> str:
    """Return text such as `  20/400` for the beginning of log lines about iterations, evaluations
    and checkpoints.
    """
    if iteration > max_iter:
        return str(iteration)  # saved outside of a run
    return f"{iteration:>{len(str(max_iter))}}/{max_iter}"


def _is_of_training(tag: str) -> bool:
    """Return whether `tag` is a number of the iteration. The `run_step` of a user may use names
    without a prefix.
    """
    return not tag.startswith(("eval/", "perf/"))


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_eval_lines(record: LogRecord) -> list[str]:
    """Return one line per dataset: `eval 200/400  val  loss 2.351 (best)  ppl 10.5  1.2 s`.

    The list is empty if the record has no `eval/` tags.
    """
    datasets = defaultdict(list)
    for tag, value in record.scalars.items():
        if tag.startswith("eval/"):
            dataset, _, metric = tag.removeprefix("eval/").rpartition("/")
            mark = " (best)" if tag == record.best else ""
            datasets[dataset or "all"].append(f"{metric} {_metric(value)}{mark}")
    seconds = record.scalars.get(EVAL_SECONDS)
    took = "" if seconds is None else f"  {seconds:.1f} s"
    if took and len(datasets) > 1:
        took += " in all"
    where = position(record.iter, record.max_iter)
    return [f"eval {where}  {name}  {'  '.join(fields)}{took}" for name, fields in datasets.items()]


def _metric(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
