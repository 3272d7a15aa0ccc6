"""Curves in a report: what was swept (a setting, or the processes), and each contender's figures over its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: the last part of a swept setting -> how it is called in tables and plots
_LABELS = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "sequence_length": "sequence length (tokens)",
    "max_seq_length": "sequence length (tokens)",
    "train_micro_batch_size": "micro-batch (samples)",
    "global_batch_size": "global batch (samples)",
    "num_accumulation_steps": "accumulation (micro-batches per iteration)",
}


@dataclass(frozen=True)
class Curve:
    """What a sweep, or one case on several numbers of processes, has measured.

    key: the setting, or "processes". values: its values as text. lines: contender -> its part of the report at each
    value, None where it took no part. cases: those of the sweep, or the one case. kind: "weak" or "strong" for
    processes, else "".
    """

    config: str
    key: str
    values: tuple[str, ...]
    lines: Mapping[str, Sequence[Mapping[str, Any] | None]]
    cases: tuple[Mapping[str, Any], ...]
    kind: str = ""

    @property
    def name(self) -> str:
        """For files: `gpt_stdlib_num_layers`, `gpt_stdlib_processes_weak`."""
        return "_".join(filter(None, [Path(self.config).stem, self.key.rpartition(".")[2], self.kind]))

    @property
    def label(self) -> str:
        """What is on the axis."""
        return _LABELS.get(self.key.rpartition(".")[2], self.key)

    @property
    def title(self) -> str:
        """`configs/gpt_stdlib.py: layers`, with the settings that all values share."""
        shared = [word for word in self.cases[0]["overrides"] if not word.startswith(f"{self.key}=")]
        what = f"{self.kind} scaling" if self.kind else self.label.partition(" (")[0]
        return f"{self.config}: {what}" + (f" ({' '.join(shared)})" if shared else "")

    @property
    def rate(self) -> tuple[str, str]:
        """`(field, unit)` of the throughput: tokens where they are counted, else samples."""
        points = [c for line in self.lines.values() for c in line if c is not None]
        counted = bool(points) and all("tokens_per_s" in c for c in points)
        return ("tokens_per_s", "tokens/s") if counted else ("samples_per_s", "samples/s")

    @property
    def splits_a_batch(self) -> bool:
        """Accumulation is swept and the samples per iteration stay: the first value can be called one big batch."""
        if not self.key.endswith("num_accumulation_steps"):
            return False
        sizes = {c["facts"].get("global_batch_size") for line in self.lines.values() for c in line if c is not None}
        return len(self.values) > 1 and len(sizes) == 1 and None not in sizes


def find_curves(report: Mapping[str, Any]) -> list[Curve]:
    """All curves of at least two values, in the report's order."""
    swept: dict[str, list[Mapping[str, Any]]] = {}
    curves = []
    for case in report["cases"]:
        if case["sweep"] is not None:
            swept.setdefault(case["config"], []).append(case)
        else:
            curves += _over_processes(case)
    curves += [_over_values(config, cases) for config, cases in swept.items() if len(cases) > 1]
    return curves


def is_in_a_curve(case: Mapping[str, Any], curves: Iterable[Curve]) -> bool:
    """True for a case of a sweep, whose table is the curve's."""
    return any(case["sweep"] is not None and any(case is one for one in curve.cases) for curve in curves)


def _over_values(config: str, cases: Sequence[Mapping[str, Any]]) -> Curve:
    names = dict.fromkeys(c["name"] for case in cases for c in case["contenders"] if _is_drawn(c))
    lines = {name: [_find(case, name) for case in cases] for name in names}
    values = tuple(case["sweep"]["value"] for case in cases)
    return Curve(config, cases[0]["sweep"]["key"], values, lines, tuple(cases))


def _over_processes(case: Mapping[str, Any]) -> list[Curve]:
    drawn = [c for c in case["contenders"] if _is_drawn(c) and c["mode"] != "command"]
    counts = sorted({c["processes"] for c in drawn})
    kinds = sorted({row["kind"] for row in case["scaling"]} - {"peak"})
    if len(counts) < 2:
        return []
    lines = {
        mode: [next((c for c in drawn if (c["mode"], c["processes"]) == (mode, n)), None) for n in counts]
        for mode in dict.fromkeys(c["mode"] for c in drawn)
    }
    return [Curve(case["config"], "processes", tuple(map(str, counts)), lines, (case,), "_".join(kinds))]


def _find(case: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((c for c in case["contenders"] if c["name"] == name and _is_drawn(c)), None)


def _is_drawn(c: Mapping[str, Any]) -> bool:
    return not (c["unavailable"] or c["is_peak"] or c["twin_of"])
