"""From measured contenders to the report, a JSON value: every figure with its spread, or the reason why it is missing.

All texts and plots are made from this value alone, so that `report.json` is all one needs to keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from libai.benchmark.modes import EAGER_OF
from libai.benchmark.plan import Case
from libai.benchmark.session import MAX_IDLE_SHARE, Measured, Outcome, Settings
from libai.benchmark.statistics import Estimate, break_even, estimate, noise_floor, paired_ratio
from libai.utils.errors import UserError

VERSION = 1
KIND = "libai benchmark"


def make_report(
    cases: Sequence[Mapping[str, Any]], settings: Settings, command: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole report from `describe_case` of each case."""
    return {
        "kind": KIND,
        "version": VERSION,
        "command": command,
        "machine": dict(machine),
        "settings": asdict(settings),
        "cases": list(cases),
    }


def read_report(path: Path) -> dict[str, Any]:
    """A report from its file; `UserError` when it is none."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Name the report.json of a benchmark.") from None
    except ValueError:
        raise UserError(f"{path} is no JSON. Name the report.json that tools/benchmark.py wrote.") from None
    if not isinstance(report, dict) or report.get("kind") != KIND or report.get("version") != VERSION:
        raise UserError(
            f"{path} is no report of this version of tools/benchmark.py (it has no kind={KIND!r}, version={VERSION}). "
            "Run the benchmark again."
        )
    return report


def describe_case(case: Case, outcome: Outcome) -> dict[str, Any]:
    """The part of the report about one case."""
    everyone = outcome.everyone
    took_part = {m.entry.name: m for m in everyone if m.unavailable is None}
    baselines, floors = _baselines(took_part), _noise_floors(took_part)
    return {
        "title": case.title,
        "config": case.config,
        "overrides": list(case.overrides),
        "sweep": None if case.sweep_key is None else {"key": case.sweep_key, "value": case.sweep_value},
        "loads": outcome.loads,
        "rounding": outcome.rounding,
        "noise": floors,
        "contenders": [_describe(m, took_part, baselines) for m in everyone],
        "break_even": _break_evens(took_part, floors),
        "scaling": _scaling(took_part),
    }


def _baselines(took_part: Mapping[str, Measured]) -> dict[int, Measured]:
    """Processes -> the contender that the others of as many processes are compared to, the first one."""
    first: dict[int, Measured] = {}
    for measured in took_part.values():
        if not measured.entry.is_peak:
            first.setdefault(measured.entry.processes, measured)
    return first


def _noise_floors(took_part: Mapping[str, Measured]) -> dict[str, dict[str, Any]]:
    """Processes (as text, for JSON) -> the noise that a contender and its twin show."""
    floors = {}
    for twin in took_part.values():
        original = took_part.get(twin.entry.twin_of or "")
        if original is not None:
            ratio = paired_ratio(twin.blocks, original.blocks)
            has_cpu = bool(original.cpu_blocks and twin.cpu_blocks)
            floors[str(twin.entry.processes)] = {
                "contender": original.entry.name,
                "floor": noise_floor(original.blocks, twin.blocks),
                "cpu_floor": noise_floor(original.cpu_blocks, twin.cpu_blocks) if has_cpu else None,
                "ratio": asdict(ratio),
            }
    return floors


def _describe(
    measured: Measured, took_part: Mapping[str, Measured], baselines: Mapping[int, Measured]
) -> dict[str, Any]:
    entry, facts = measured.entry, measured.facts
    described: dict[str, Any] = {
        "name": entry.name,
        "mode": entry.mode,
        "processes": entry.processes,
        "twin_of": entry.twin_of,
        "is_peak": entry.is_peak,
        "environment": dict(entry.environment),
        "unavailable": measured.unavailable,
        "facts": facts,
    }
    if measured.unavailable is not None:
        return described
    missing: dict[str, str] = {}
    described.update(
        blocks=measured.blocks,
        block_iterations=measured.block_iterations,
        step_seconds=estimate(measured.blocks),
        first_seconds=measured.first_seconds,
        launch_seconds=measured.launch_seconds,
        losses=measured.losses,
        missing=missing,
    )
    for name, fact, what in (
        ("samples_per_s", "global_batch_size", "the contender reports no global batch size"),
        (
            "tokens_per_s",
            "tokens_per_iter",
            "no trainer took part that counts them, or the samples are no token sequences",
        ),
        ("flops_per_s", "flops_per_iter", "the model has no num_flops_per_sample"),
    ):
        if entry.is_peak and name != "flops_per_s":
            missing[name] = "a matrix product has no samples"
        elif facts.get(fact):
            described[name] = estimate([facts[fact] / seconds for seconds in measured.blocks])
        else:
            missing[name] = what
    _describe_peak_share(measured, took_part, described, missing)
    baseline = baselines.get(entry.processes)
    if baseline is not None and baseline is not measured and not entry.is_peak:
        described["ratio"] = {"to": baseline.entry.name, **asdict(paired_ratio(measured.blocks, baseline.blocks))}
        if measured.cpu_blocks and baseline.cpu_blocks:
            cpu = paired_ratio(measured.cpu_blocks, baseline.cpu_blocks)
            described["cpu_ratio"] = {"to": baseline.entry.name, **asdict(cpu)}
    _describe_resources(measured, described, missing)
    described["saves"] = _describe_saves(measured.saves)
    return described


def share_token_counts(everyone: Sequence[Measured]) -> None:
    """Give hand-written loops the tokens per iteration that a trainer of the same global batch has counted."""
    counted = {
        m.facts["global_batch_size"]: m.facts["tokens_per_iter"] for m in everyone if m.facts.get("tokens_per_iter")
    }
    for measured in everyone:
        size = measured.facts.get("global_batch_size")
        if size in counted and "tokens_per_iter" not in measured.facts:
            measured.facts["tokens_per_iter"] = counted[size]


def _describe_peak_share(
    measured: Measured, took_part: Mapping[str, Measured], described: dict[str, Any], missing: dict[str, str]
) -> None:
    """FLOP/s as a share of what a matrix product reached in the same rounds."""
    entry = measured.entry
    peak = next((m for m in took_part.values() if m.entry.is_peak and m.entry.processes == entry.processes), None)
    if entry.is_peak:
        missing["peak_share"] = "this is the peak"
    elif "flops_per_s" not in described:
        missing["peak_share"] = missing["flops_per_s"]
    elif peak is None:
        missing["peak_share"] = "no peak was measured"
    else:
        flops, peak_flops = measured.facts["flops_per_iter"], peak.facts["flops_per_iter"]
        shares = [flops / mine / (peak_flops / other) for mine, other in zip(measured.blocks, peak.blocks)]
        described["peak_share"] = estimate(shares)


def _describe_resources(measured: Measured, described: dict[str, Any], missing: dict[str, str]) -> None:
    facts = measured.facts
    for name, reason in (
        ("peak_rss_bytes", "the contender does not report it"),
        ("build_seconds", "nothing is compiled" if "graph" not in measured.entry.mode else "part of first_seconds"),
        ("device_bytes", "runs on the CPU" if facts.get("device", "cpu") == "cpu" else "not reported"),
    ):
        if facts.get(name) is None:
            missing[name] = reason
        else:
            described[name] = facts[name]
    if measured.cpu_blocks:
        described["cpu_seconds"] = estimate(measured.cpu_blocks)
    else:
        missing["cpu_seconds"] = "the contender does not report it"
    if measured.data_shares:
        described["data_share"] = estimate(measured.data_shares)
    else:
        missing["data_share"] = "the contender does not report it"
    if measured.idle_share is not None:
        described["idle_share"] = measured.idle_share
        described["disturbs_others"] = measured.idle_share > MAX_IDLE_SHARE


def _describe_saves(saves: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How long saves held training up. The first asynchronous one also takes the memory for its copy: told apart.

    `fastest`: the shortest save of each kind. What other work on the machine adds is least in it.
    """
    if not saves.get("sync") or not saves.get("async"):
        return {}
    described: dict[str, Any] = {
        "iteration_beside_seconds": estimate(saves["iteration_beside"]),
        "sync_seconds": estimate(saves["sync"]),
        "async_first_seconds": saves["async"][0],
    }
    later = saves["async"][1:]
    if later:
        described["async_seconds"] = estimate(later)
        described["stall_share"] = estimate([a / s for a, s in zip(later, saves["sync"][1:])])
        fastest_sync, fastest_async = min(saves["sync"]), min(later)
        described["fastest"] = {
            "sync_seconds": fastest_sync,
            "async_seconds": fastest_async,
            "stall_share": fastest_async / fastest_sync,
        }
    return described


def _break_evens(took_part: Mapping[str, Measured], floors: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each compiled contender against the eager one of as many processes."""
    found = []
    originals = {(m.entry.mode, m.entry.processes): m for m in took_part.values() if m.entry.twin_of is None}
    for (mode, processes), measured in originals.items():
        eager = originals.get((EAGER_OF.get(mode, ""), processes))
        if eager is None:
            continue
        assert measured.first_seconds is not None and eager.first_seconds is not None
        point = break_even(
            measured.entry.name,
            eager.entry.name,
            measured.first_seconds,
            eager.first_seconds,
            Estimate.of(measured.blocks),
            Estimate.of(eager.blocks),
            paired_ratio(measured.blocks, eager.blocks),
            floors.get(str(processes), {}).get("floor", 0.0),
        )
        found.append(asdict(point))
    return found


def _scaling(took_part: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Contenders of several processes against the same one of the fewest: speed-up in samples per second, paired."""
    found = []
    originals = [m for m in took_part.values() if m.entry.twin_of is None and m.entry.mode != "command"]
    for measured in originals:
        entry = measured.entry
        few = min((m for m in originals if m.entry.mode == entry.mode), key=lambda m: m.entry.processes)
        if few.entry.processes >= entry.processes:
            continue
        unit = "flops_per_iter" if entry.is_peak else "global_batch_size"
        work = measured.facts[unit] / few.facts[unit]
        speedups = [work * a / b for a, b in zip(few.blocks, measured.blocks)]
        more = entry.processes / few.entry.processes
        found.append(
            {
                "contender": entry.name,
                "to": few.entry.name,
                "kind": "peak" if entry.is_peak else ("strong" if work == 1 else "weak"),
                "speedup": estimate(speedups),
                "efficiency": estimate([speedup / more for speedup in speedups]),
            }
        )
    return found
