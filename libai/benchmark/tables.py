"""A report as tables of text: on the console and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

HEADER = ("contender", "ms/iteration", "ratio", "samples/s", "tokens/s", "GFLOP/s", "of peak", "first it.", "launch", "RSS")
NOT_AVAILABLE = "n/a"


def contender_rows(case: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of `HEADER` per contender; spreads as `median [low-high]`, what is missing as n/a."""
    return [_row(contender) for contender in case["contenders"]]


def _row(c: Mapping[str, Any]) -> tuple[str, ...]:
    if c["unavailable"]:
        return (c["name"], *[NOT_AVAILABLE] * (len(HEADER) - 1))
    return (
        c["name"],
        _spread(c["step_seconds"], 1e3),
        _spread(c.get("ratio"), 1.0, digits=3) if c.get("ratio") else ("1" if not c["is_peak"] else NOT_AVAILABLE),
        _spread(c.get("samples_per_s"), 1.0),
        _spread(c.get("tokens_per_s"), 1.0),
        _spread(c.get("flops_per_s"), 1e-9),
        _spread(c.get("peak_share"), 100.0, digits=2, unit=" %"),
        f"{c['first_seconds']:.2f} s",
        f"{c['launch_seconds']:.1f} s",
        f"{c['peak_rss_bytes'] / 2**20:,.0f} MiB" if "peak_rss_bytes" in c else NOT_AVAILABLE,
    )


def notes(case: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know: noise, break-even, scaling, saves, who did not take part, what is n/a."""
    lines = []
    for processes, noise in case["noise"].items():
        lines.append(
            f"Noise with {processes} process(es): {noise['floor']:.1%}, between two runs of {noise['contender']} in "
            f"the same turns (ratio {_spread(noise['ratio'], 1.0, digits=3)}). Smaller differences mean nothing."
        )
    if not case["noise"]:
        lines.append("Noise: not measured, there was no second run of a contender.")
    lines += [f"Break-even: {point['reason']}." for point in case["break_even"]]
    for scaling in case["scaling"]:
        what = "the peak itself scales" if scaling["kind"] == "peak" else f"{scaling['kind']} scaling"
        lines.append(
            f"{scaling['contender']} against {scaling['to']}, {what}: {_spread(scaling['speedup'], 1.0, digits=3)} "
            f"times the throughput, efficiency {_spread(scaling['efficiency'], 100.0, digits=2, unit=' %')}."
        )
    for c in case["contenders"]:
        lines += _contender_notes(c)
    lines += _missing(case)
    return lines


def _contender_notes(c: Mapping[str, Any]) -> list[str]:
    name = c["name"]
    if c["unavailable"]:
        return [f"{name} took no part: {c['unavailable']}."]
    lines = []
    if "build_seconds" in c:
        lines.append(f"{name}: {c['build_seconds']:.2f} s of its first iteration are compilation.")
    if c.get("disturbs_others"):
        lines.append(f"{name} used {c['idle_share']:.0%} of a core while it waited, which disturbs the others.")
    saves = c.get("saves") or {}
    if saves:
        step = c["step_seconds"]["median"]
        sync = saves["sync_seconds"]["median"]
        text = f"{name}, a checkpoint holds training up for {_spread(saves['sync_seconds'], 1e3)} ms"
        text += f" ({sync / step:.1f} iterations) when it is written on the spot"
        if "async_seconds" in saves:
            text += (
                f", for {_spread(saves['async_seconds'], 1e3)} ms ({saves['async_seconds']['median'] / step:.1f} "
                f"iterations, {_spread(saves['stall_share'], 100.0, digits=2, unit=' %')} of that) in the background"
            )
        lines.append(f"{text}; the first in the background {saves['async_first_seconds'] * 1e3:.3g} ms.")
    return lines


def _missing(case: Mapping[str, Any]) -> list[str]:
    """Each reason once, with the figures and contenders that it is about."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for c in case["contenders"]:
        for figure, reason in c.get("missing", {}).items():
            if not c["is_peak"]:
                reasons.setdefault((figure, reason), []).append(c["name"])
    everyone = sum(1 for c in case["contenders"] if not c["unavailable"] and not c["is_peak"])
    return [
        f"{figure} n/a{'' if len(names) == everyone else ' for ' + ', '.join(names)}: {reason}."
        for (figure, reason), names in reasons.items()
    ]


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The tables and notes of all cases on a console."""
    for case in report["cases"]:
        table = Table(title=case["title"], title_justify="left", header_style="bold")
        for number, title in enumerate(HEADER):
            table.add_column(title, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for row in contender_rows(case):
            table.add_row(*row)
        console.print(table)
        for line in notes(case):
            console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
        console.print()


def to_markdown(report: Mapping[str, Any], heading: str = "#") -> str:
    """The report as Markdown, without plots. `heading`: the level of its sections."""
    parts = [f"{heading} Machine and method", "", *machine_lines(report), ""]
    for case in report["cases"]:
        parts += [f"{heading} {case['title']}", "", *_markdown_table(HEADER, contender_rows(case)), ""]
        parts += [f"* {line}" for line in notes(case)]
        parts.append("")
    return "\n".join(parts)


def machine_lines(report: Mapping[str, Any]) -> list[str]:
    """What ran where and how, as a Markdown list."""
    machine, settings = report["machine"], report["settings"]
    return [
        f"* Command: `{report['command']}`",
        f"* Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gb')} GB; "
        f"{machine.get('os')}; devices: {machine.get('devices') or 'none but the CPU'}",
        f"* Software: libai {machine.get('libai')} ({machine.get('commit')}), oneflow {machine.get('oneflow')}, "
        f"python {machine.get('python')}",
        f"* Load average when it began: {machine.get('load')}",
        f"* Every contender is a process of its own; they take turns, {settings['rounds']} rounds of blocks of about "
        f"{settings['block_seconds']:g} s. Times are medians over blocks with a 95 % interval in brackets; ratios are "
        "medians over rounds. The first iteration compiles and is not among them.",
        f"* Their losses agreed in the first {settings['check_iterations']} iterations to "
        f"{settings['loss_tolerance']:g} (relative). The learning rate is constant.",
        "* RSS is the largest resident memory of the contender's processes, added up: shared pages count in each.",
    ]


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _spread(estimate: Mapping[str, Any] | None, scale: float, digits: int = 3, unit: str = "") -> str:
    if not estimate:
        return NOT_AVAILABLE
    median, low, high = (_short(estimate[name] * scale, digits) for name in ("median", "low", "high"))
    return f"{median}{unit} [{low}-{high}]"


def _short(value: float, digits: int) -> str:
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
