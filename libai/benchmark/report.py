"""The report, a JSON value: every figure of every variant with its spread.

All texts are made from this value alone, so that `report.json` is all one needs to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from libai.benchmark.cases import MODES, Case
from libai.benchmark.measure import Measured, Outcome, Settings
from libai.benchmark.statistics import Estimate, break_even, estimate, noise_floor, paired_ratio

KIND, VERSION = "libai benchmark", 1
#: share of a core that a variant may use while it waits; more disturbs the one whose turn it is
MAX_IDLE_SHARE = 0.05
#: figure → the fact that a block's time is divided into, and the reason that stands where it is missing
_RATES = {
    "samples_per_s": ("global_batch_size", "the variant reports no global batch size"),
    "tokens_per_s": ("tokens_per_iter", "no trainer took part that counts them, or samples are no token sequences"),
    "flops_per_s": ("flops_per_iter", "no trainer took part that counts them"),
}


def make_report(
    cases: Sequence[Mapping[str, Any]], settings: Settings, command: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The report from `describe_case` of each case."""
    head = {"kind": KIND, "version": VERSION, "command": command, "machine": dict(machine)}
    return {**head, "settings": asdict(settings), "cases": list(cases)}


def describe_case(case: Case, outcome: Outcome) -> dict[str, Any]:
    """The part of the report about one case."""
    took_part = [m for m in outcome.everyone if m.unavailable is None]
    _share_counts(took_part)
    floors = _noise_floors(took_part)
    return {
        "title": case.title,
        "config": case.config,
        "overrides": list(case.overrides),
        "loads": outcome.loads,
        "rounding": outcome.rounding,
        "noise": floors,
        "variants": [_describe(m, took_part) for m in outcome.everyone],
        "break_even": _break_evens(took_part, floors),
        "scaling": _scaling(took_part),
    }


def _share_counts(took_part: Sequence[Measured]) -> None:
    """Give hand-written loops the tokens and FLOPs that a trainer of the same global batch has counted."""
    for name in ("tokens_per_iter", "flops_per_iter"):
        trainings = [m.facts for m in took_part if not m.spec.is_peak]
        counted = {facts.get("global_batch_size"): facts[name] for facts in trainings if facts.get(name)}
        for facts in trainings:
            if counted.get(facts.get("global_batch_size")):
                facts[name] = facts.get(name) or counted[facts["global_batch_size"]]


def _noise_floors(took_part: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Processes (as text, for JSON) → the noise that a variant and its twin show."""
    by_name = {m.spec.name: m for m in took_part}
    floors = {}
    for twin in took_part:
        original = by_name.get(twin.spec.twin_of or "")
        if original is not None:
            has_cpu = bool(original.cpu_blocks and twin.cpu_blocks)
            floors[str(twin.spec.processes)] = {
                "variant": original.spec.name,
                "floor": noise_floor(original.blocks, twin.blocks),
                "cpu_floor": noise_floor(original.cpu_blocks, twin.cpu_blocks) if has_cpu else None,
                "ratio": asdict(paired_ratio(twin.blocks, original.blocks)),
            }
    return floors


def _describe(measured: Measured, took_part: Sequence[Measured]) -> dict[str, Any]:
    spec, facts = measured.spec, measured.facts
    described: dict[str, Any] = {
        **{name: getattr(spec, name) for name in ("name", "mode", "processes", "twin_of", "is_peak")},
        "environment": dict(spec.environment),
        "unavailable": measured.unavailable,
        "facts": facts,
    }
    if measured.unavailable is not None:
        return described
    missing: dict[str, str] = {}
    for name in ("blocks", "block_iterations", "first_seconds", "launch_seconds", "losses"):
        described[name] = getattr(measured, name)
    described.update(step_seconds=estimate(measured.blocks), missing=missing)
    for name in ("peak_rss_bytes", "device_bytes", "build_seconds"):
        if facts.get(name) is not None:
            described[name] = facts[name]
    for name, blocks in (("cpu_seconds", measured.cpu_blocks), ("data_share", measured.data_shares)):
        if blocks:
            described[name] = estimate(blocks)
        else:
            missing[name] = "the variant does not report it"
    for name, (fact, why) in _RATES.items():
        if facts.get(fact):
            described[name] = estimate([facts[fact] / seconds for seconds in measured.blocks])
        else:
            missing[name] = why
    if not spec.is_peak:
        _compare_to_others(measured, took_part, described, missing)
    if measured.idle_share is not None:
        described["idle_share"] = measured.idle_share
        described["disturbs_others"] = measured.idle_share > MAX_IDLE_SHARE
    return described


def _compare_to_others(
    measured: Measured, took_part: Sequence[Measured], described: dict[str, Any], missing: dict[str, str]
) -> None:
    """FLOP/s as a share of the peak's, and ratios to the first variant, both of as many processes and paired."""
    equals = [m for m in took_part if m.spec.processes == measured.spec.processes]
    peak = next((m for m in equals if m.spec.is_peak), None)
    if "flops_per_s" not in described or peak is None:
        missing["peak_share"] = missing.get("flops_per_s", "no peak was measured")
    else:
        work = measured.facts["flops_per_iter"] / peak.facts["flops_per_iter"]
        described["peak_share"] = estimate([work * b / a for a, b in zip(measured.blocks, peak.blocks)])
    baseline = next(m for m in equals if not m.spec.is_peak)
    if baseline is measured:
        return
    described["ratio"] = {"to": baseline.spec.name, **asdict(paired_ratio(measured.blocks, baseline.blocks))}
    if measured.cpu_blocks and baseline.cpu_blocks:
        cpu = paired_ratio(measured.cpu_blocks, baseline.cpu_blocks)
        described["cpu_ratio"] = {"to": baseline.spec.name, **asdict(cpu)}


def _break_evens(took_part: Sequence[Measured], floors: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each compiled variant against the eager one of as many processes."""
    found = []
    originals = {(m.spec.mode, m.spec.processes): m for m in took_part if m.spec.twin_of is None}
    for (mode, processes), graph in originals.items():
        eager = originals.get((mode.replace("graph", "eager"), processes))
        if mode not in MODES or MODES[mode].base != "graph" or eager is None:
            continue
        point = break_even(
            (graph.spec.name, eager.spec.name),
            (graph.first_seconds, eager.first_seconds),
            (Estimate.of(graph.blocks).median, Estimate.of(eager.blocks).median),
            paired_ratio(graph.blocks, eager.blocks),
            floors.get(str(processes), {}).get("floor", 0.0),
        )
        found.append(point)
    return found


def _scaling(took_part: Sequence[Measured]) -> list[dict[str, Any]]:
    """Variants of several processes against the same one of the fewest: speed-up in samples per second, paired."""
    found = []
    originals = [m for m in took_part if m.spec.twin_of is None and m.spec.mode != "command"]
    for measured in originals:
        spec = measured.spec
        few = min((m for m in originals if m.spec.mode == spec.mode), key=lambda m: m.spec.processes)
        if few.spec.processes >= spec.processes:
            continue
        unit = "flops_per_iter" if spec.is_peak else "global_batch_size"
        work = measured.facts[unit] / few.facts[unit]
        speedups = [work * a / b for a, b in zip(few.blocks, measured.blocks)]
        more = spec.processes / few.spec.processes
        row = {"variant": spec.name, "to": few.spec.name, "speedup": estimate(speedups)}
        row["kind"] = "peak" if spec.is_peak else ("strong" if work == 1 else "weak")
        found.append({**row, "efficiency": estimate([speedup / more for speedup in speedups])})
    return found
