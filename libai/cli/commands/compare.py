"""Compare runs: how they ended, their metrics, and the settings and versions that differ.

A single run is compared with the defaults. A folder of runs becomes one table with a row for each
run below it: the settings that differ and the metrics at the best evaluation, best run first. With
--output, a self-contained HTML page with the curves is written too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from libai.cli.commands.page import Curve, Curves, page_of
from libai.config.settings.coercion import flatten
from libai.launch.command_line import Parser
from libai.utils.atomic import atomic_write_text, config_of_run, read_json
from libai.utils.errors import UserError
from libai.utils.screen import format_table

#: settings that name the run and therefore always differ
_NAMES = ("train.output_dir",)
#: parts of env.json that can explain a difference
_FACTS = ("layout", "libai", "git", "oneflow", "packages", "python", "machine")
#: sections that have no defaults but are shown for a single run
_CHOSEN = ("model", "optim", "lr_scheduler")
#: name of the column that a single run is compared with
_DEFAULT = "default"
#: marks a setting that a run does not have
_MISSING = object()


@dataclass(frozen=True)
class Record:
    """A run, as read from its output folder.

    Attributes:
        settings: dotted key -> value, from the resolved config and env.json.
        status: how the run ended, or `unfinished` if it is still running or was killed.
        best: metric, value and iteration of the best checkpoint, and all metrics at that iteration;
            empty if there is none.
        weights: SHA-256 of the weights in the last checkpoint, or None.
        finder: curve of the learning-rate finder for this output folder, or None.
    """

    settings: dict[str, Any]
    curves: Curves
    status: str
    best: dict[str, Any]
    weights: str | None
    finder: Curve | None = None

    @property
    def is_judged(self) -> bool:
        """Return whether the run has a best evaluation."""
        return self.best.get("value") is not None

    @property
    def iterations(self) -> int:
        """Last logged iteration, or 0 if nothing was logged."""
        return max((iterations[-1] for iterations, _ in self.curves.values()), default=0)

    @property
    def metrics(self) -> dict[str, float]:
        """Last value of each metric."""
        return {tag: values[-1] for tag, (_, values) in self.curves.items()}


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code."""
    args = build_parser().parse_args(arguments)
    page = args.output
    if page and page.suffix != ".html":
        raise UserError(f"--output {page}: it must end in .html.")
    folders = [Path(name) for name in args.runs]
    paths = [path for folder in folders for path in runs_in(folder)]
    records = {str(path): read_record(path) for path in paths}
    labels = {name: name for name in records}
    if paths != folders:  # one of them is a folder of runs
        records = ranked(records)
        labels = label_of_runs(records)
        tables = [ranking_table(records)]
    else:
        tables = [metrics_table(records), settings_table(records)]
    if page:
        page.parent.mkdir(parents=True, exist_ok=True)
        curves = {labels[name]: record.curves for name, record in records.items()}
        finders = {labels[name]: record.finder for name, record in records.items() if record.finder}
        atomic_write_text(page, page_of(tables, curves, finders))
    if args.json:
        print(json.dumps(as_json(records), indent=1))
    else:
        print("\n\n".join(format_table(rows) for rows in tables))
        if page:
            print(f"\nwrote {page}")
    return 0


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="output folder of a run, or a folder of runs"
    )
    parser.add_argument(
        "--output", "-o", type=Path, metavar="PAGE.html", help="also write a page with curves"
    )
    parser.add_flag("--json", "print JSON")
    return parser


def runs_in(folder: Path) -> list[Path]:
    """Return `folder` if it holds a run, else the runs below it, except earlier ones that a new run
    has moved to `previous`.
    """
    if (folder / "config.yaml").is_file():
        return [folder]
    below = sorted(file.parent for file in folder.rglob("config.yaml"))
    found = [path for path in below if "previous" not in path.relative_to(folder).parts]
    return found or [folder]  # reading it reports the mistake


def read_record(run: Path) -> Record:
    """Read the output folder of a run, which may still be training.

    Raises `UserError` if it holds no run.
    """
    file = config_of_run(run)
    try:
        settings = dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}.") from None
    environment = read_json(run / "env.json")
    facts = {name: environment[name] for name in _FACTS if name in environment}
    summary = read_json(run / "summary.json")
    status = str(summary.get("status", "unfinished"))
    return Record(
        flatten({**settings, **facts}),
        read_curves(run / "metrics.jsonl"),
        status,
        summary.get("best") or {},
        summary.get("weights_sha256"),
        read_finder(run.absolute().parent / f"{run.absolute().name}_find_lr.json"),
    )


def read_finder(file: Path) -> Curve | None:
    """Return the learning rates and losses that `--find-lr` wrote, or None without such a file."""
    content = read_json(file)
    try:
        return list(map(float, content["lrs"])), list(map(float, content["losses"]))
    except (KeyError, TypeError, ValueError):
        return None


def read_curves(file: Path) -> Curves:
    """Return all metrics in a metrics.jsonl file.

    The result is empty if nothing has been logged yet.
    """
    curves: Curves = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line may be incomplete while the run is still writing
            continue
        for tag, value in row.items():
            if tag != "iter" and isinstance(value, (int, float)):
                iterations, values = curves.setdefault(tag, ([], []))
                iterations.append(row["iter"])
                values.append(value)
    return curves


def differing(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Return the keys that differ, each with its value in every run that has it.

    A single run is compared with the defaults.
    """
    columns = {name: record.settings for name, record in records.items()}
    if len(records) == 1:
        from libai.config.settings.schema import TYPED_SECTIONS

        (name, settings), *_ = columns.items()
        chosen = {
            key: settings[key]
            for key in settings
            if key.partition(".")[0] in (*TYPED_SECTIONS, *_CHOSEN)
        }
        defaults = flatten({name: asdict(cls()) for name, cls in TYPED_SECTIONS.items()})
        # the default of a section, such as {}, is not compared if the run has filled the section
        columns = {
            _DEFAULT: {key: defaults[key] for key in defaults if key in chosen},
            name: chosen,
        }
    found = {}
    keys = dict.fromkeys(key for settings in columns.values() for key in settings)
    for key in keys:
        values = {name: settings[key] for name, settings in columns.items() if key in settings}
        compared = [values.get(name, _MISSING) for name in columns]
        if "." not in key or any(other.startswith(f"{key}.") for other in keys):
            compared = [
                None if value is _MISSING else value for value in compared
            ]  # a section is null by default
        if key not in _NAMES and any(value != compared[0] for value in compared):
            found[key] = values
    return found


def settings_table(records: dict[str, Record]) -> list[list[str]]:
    """Return a header and one row per setting or version that differs."""
    names = [_DEFAULT, *records] if len(records) == 1 else list(records)
    rows = [["differs", *names]]
    for key, values in differing(records).items():
        rows.append([key, *(_show(values.get(name, _MISSING)) for name in names)])
    return rows if len(rows) > 1 else [*rows, ["nothing", *("" for _ in names)]]


def metrics_table(records: dict[str, Record]) -> list[list[str]]:
    """Return a header, rows that describe how each run ended, and one row per metric."""
    found = list(records.values())
    rows = [["last value", *records], ["status", *(record.status for record in found)]]
    rows.append(["iterations", *(str(record.iterations) for record in found)])
    if any(record.best for record in found):
        rows.append(["best", *(_show_best(record.best) for record in found)])
    if any(record.weights for record in found):
        rows.append(["weights", *(_show_weights(record, found[0]) for record in found)])
    for tag in dict.fromkeys(tag for record in found for tag in record.metrics):
        rows.append([tag, *(_show(record.metrics.get(tag, _MISSING)) for record in found)])
    return rows


def ranked(records: dict[str, Record]) -> dict[str, Record]:
    """Return the runs sorted by their best value, the best run first.

    Runs with different deciding metrics are grouped by metric; runs without one come last.
    """

    def key(name: str) -> tuple[bool, str, float]:
        record = records[name]
        if not record.is_judged:
            return True, "", 0.0
        sign = -1.0 if record.best.get("mode") == "max" else 1.0
        return False, str(record.best["metric"]), sign * record.best["value"]

    return {name: records[name] for name in sorted(records, key=key)}


def chosen_settings(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Return the settings of the config that differ between several runs, by their short names:
    the last part of the key, or the whole key if two end alike.
    """
    if len(records) < 2:
        return {}
    found = differing(records)
    keys = [key for key in found if key.partition(".")[0] not in _FACTS]
    ends = [key.rpartition(".")[2] for key in keys]
    return {end if ends.count(end) == 1 else key: found[key] for key, end in zip(keys, ends)}


def label_of_runs(records: dict[str, Record]) -> dict[str, str]:
    """Return output folder → name in the legend: the settings that differ, or else the folder."""
    settings = chosen_settings(records)
    labels = {}
    for name in records:
        parts = [f"{key}={_show(values.get(name, _MISSING))}" for key, values in settings.items()]
        labels[name] = " ".join(parts) or name
    is_unique = len({*labels.values()}) == len(labels)
    return labels if is_unique else {name: name for name in records}


def ranking_table(records: dict[str, Record]) -> list[list[str]]:
    """Return a header and one row per run: settings that differ, metrics at the best evaluation
    (the last values of evaluations if none decides), its iteration, and how the run ended.
    """
    settings = chosen_settings(records)
    metrics = {}
    for name, record in records.items():
        last = {
            tag.removeprefix("eval/"): value
            for tag, value in record.metrics.items()
            if tag.startswith("eval/")
        }
        metrics[name] = record.best.get("metrics") or last
    tags = list(dict.fromkeys(tag for found in metrics.values() for tag in found))
    deciding = {record.best["metric"] for record in records.values() if record.is_judged}
    # the deciding metric first
    tags.sort(key=lambda tag: tag not in deciding and f"eval/{tag}" not in deciding)
    rows = [["run", *settings, *tags, "at", "status"]]
    for name, record in records.items():
        chosen = [_show(values.get(name, _MISSING)) for values in settings.values()]
        values = [_show(metrics[name].get(tag, _MISSING)) for tag in tags]
        at = record.best["iteration"] if record.is_judged else record.iterations
        rows.append([name, *chosen, *values, str(at), record.status])
    return rows


def _show_weights(record: Record, first: Record) -> str:
    """Return the first digits of the SHA-256, or a note that the first run has the same weights."""
    if record is not first and record.weights and record.weights == first.weights:
        return "same weights"
    return f"sha256 {record.weights[:12]}" if record.weights else "-"


def _show_best(best: dict[str, Any]) -> str:
    return f"{best['metric']} {_show(best['value'])} at {best['iteration']}" if best else "-"


def _show(value: object) -> str:
    """Format a value as it is written in a config.

    Floats get at most six digits, and an empty string gets quotes.
    """
    if value is _MISSING:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if value and isinstance(value, str) else json.dumps(value, default=str)


def as_json(records: dict[str, Record]) -> dict[str, Any]:
    """Return the values of both tables, unrounded."""
    runs = {}
    for name, record in records.items():
        # JSON has no NaN
        metrics = {
            tag: value if math.isfinite(value) else None for tag, value in record.metrics.items()
        }
        runs[name] = {
            "status": record.status,
            "iterations": record.iterations,
            "best": record.best,
            "weights_sha256": record.weights,
            "metrics": metrics,
        }
    return {"runs": runs, "differs": differing(records)}
