"""What a run has left in its output folder: settings, environment, metrics and summary; and how runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai.utils.atomic import read_json
from libai.utils.errors import UserError

#: tag -> iterations and values
Curves = dict[str, tuple[list[int], list[float]]]
#: in place of the value of a key that a run does not have
MISSING = object()
#: they name the run, and would differ between any two
_NAMES = ("train.output_dir", "train.name")


@dataclass(frozen=True)
class Record:
    """A run as its folder tells it.

    Attributes:
        settings: dotted key -> value of the resolved config.
        facts: what else distinguishes runs: processes, versions, commit, machine.
        summary: of summary.json; empty while the run has not ended.
    """

    settings: dict[str, Any]
    facts: dict[str, Any]
    curves: Curves
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        """How the run ended; `unfinished` where it has not, or was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def all_settings(self) -> dict[str, Any]:
        """The settings and the facts."""
        return {**self.settings, **self.facts}

    @property
    def iterations(self) -> int:
        """The last iteration that was logged; 0 before the first."""
        return max((iterations[-1] for iterations, _ in self.curves.values()), default=0)

    @property
    def final_metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return {tag: values[-1] for tag, (_, values) in self.curves.items()}


def read_record(run: Path) -> Record:
    """What is in the folder of a run; `UserError` where it holds none. A run that still trains is read as it is."""
    import yaml

    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run} holds no run: there is no config.yaml in it. Give the output folder of a run.")
    try:
        settings = flatten(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}.") from None
    return Record(settings, _facts(read_json(run / "env.json")), read_curves(run), read_json(run / "summary.json"))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists are values.

    >>> flatten({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "model": None})
    {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'model': None}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        found.update(flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value})
    return found


def read_curves(run: Path) -> Curves:
    """All metrics of a run's metrics.jsonl; none before the first is logged."""
    file = run / "metrics.jsonl"
    curves: Curves = {}
    if not file.is_file():
        return curves
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that still writes
            continue
        for tag, value in row.items():
            if tag != "iter" and isinstance(value, (int, float)):
                iterations, values = curves.setdefault(tag, ([], []))
                iterations.append(row["iter"])
                values.append(value)
    return curves


def differing(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Key -> the value in each of `rows`, where not all are equal; `MISSING` where a key is missing."""
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key, MISSING) for row in rows]
        if key not in _NAMES and any(value != values[0] for value in values):
            found[key] = values
    return found


def show(value: Any) -> str:
    """A value as it is written in a config; numbers with at most six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _facts(environment: dict[str, Any]) -> dict[str, Any]:
    facts = {
        "processes": ("layout", "world_size"),
        "libai": ("libai",),
        "commit": ("git", "commit"),
        "oneflow": ("oneflow", "version"),
        "kernels": ("oneflow", "cpu_kernels"),
        "python": ("python",),
        "machine": ("machine", "host"),
        "processor": ("machine", "cpu"),
        "cores": ("machine", "cores"),
    }
    found: dict[str, Any] = {}
    for name, path in facts.items():
        value: Any = environment
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
