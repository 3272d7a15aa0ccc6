"""A report as tables of text: on the console and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from libai.benchmark.curve_tables import curve_notes, curve_table
from libai.benchmark.curves import find_curves, is_in_a_curve
from libai.benchmark.session import ROUNDING_FACTOR
from libai.benchmark.statistics import NOT_AVAILABLE, format_spread, short

HEADER = (
    "contender",
    "ms/iter",
    "ratio",
    "CPU ms",
    "CPU ratio",
    "samples/s",
    "tokens/s",
    "GFLOP/s",
    "of peak",
    "first s",
    "launch s",
    "RSS MiB",
)


#: with fewer, a median and its interval say nothing
LEAST_ROUNDS = 3


def contender_rows(case: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of `HEADER` per contender; spreads as `median ±uncertainty`, what is missing as n/a."""
    return [_row(contender) for contender in case["contenders"]]


def _row(c: Mapping[str, Any]) -> tuple[str, ...]:
    if c["unavailable"]:
        return (c["name"], *[NOT_AVAILABLE] * (len(HEADER) - 1))
    return (
        c["name"],
        format_spread(c["step_seconds"], 1e3),
        _ratio(c, "ratio"),
        format_spread(c.get("cpu_seconds"), 1e3),
        _ratio(c, "cpu_ratio") if "cpu_seconds" in c else NOT_AVAILABLE,
        format_spread(c.get("samples_per_s")),
        format_spread(c.get("tokens_per_s")),
        format_spread(c.get("flops_per_s"), 1e-9),
        format_spread(c.get("peak_share"), 100.0, unit=" %"),
        f"{c['first_seconds']:.2f}",
        f"{c['launch_seconds']:.1f}",
        f"{c['peak_rss_bytes'] / 2**20:,.0f}" if "peak_rss_bytes" in c else NOT_AVAILABLE,
    )


def notes(case: Mapping[str, Any], cores: int) -> list[str]:
    """What a reader of the table must know: noise, break-even, scaling, saves, who did not take part, what is n/a."""
    lines = []
    for processes, noise in case["noise"].items():
        lines.append(
            f"Noise with {processes} process(es): {noise['floor']:.1%}, between two runs of {noise['contender']} in "
            f"the same turns (ratio {format_spread(noise['ratio'])}). Smaller differences mean nothing."
        )
        if noise["cpu_floor"] is not None:
            lines[-1] += f" Of processor time: {noise['cpu_floor']:.1%}."
    loads = case["loads"]
    lines.append(f"Load average in the rounds: {min(loads):.1f} to {max(loads):.1f} on {cores} cores.")
    if max(loads) > cores + 1:
        lines.append(
            "The machine was busy with other work: one that computes in several threads gets a larger share of it, "
            "which wall times (and the break-even) count in its favour. Believe the processor times, and measure again."
        )
    if not case["noise"]:
        lines.append("Noise: not measured, there was no second run of a contender.")
    waits = [f"{c['name']} {c['data_share']['median']:.2%}" for c in case["contenders"] if _waits_for_data(c)]
    if waits:
        lines.append(f"Share of an iteration spent waiting for data: {', '.join(waits)}.")
    rounding = case.get("rounding")
    if rounding:
        lines.append(
            f"Losses of {' and '.join(rounding['contenders'])} part by {rounding['difference']:.1e} in iteration "
            f"{rounding['iteration']}: this training amplifies rounding. A change in the last bit of its weights parts "
            f"them by {rounding['allowed'] / ROUNDING_FACTOR:.1e} there; {ROUNDING_FACTOR:g} times as much was allowed."
        )
    lines += [f"Break-even: {point['reason']}." for point in case["break_even"]]
    for scaling in case["scaling"]:
        what = "the peak itself scales" if scaling["kind"] == "peak" else f"{scaling['kind']} scaling"
        lines.append(
            f"{scaling['contender']} against {scaling['to']}, {what}: {format_spread(scaling['speedup'])} "
            f"times the throughput, efficiency {format_spread(scaling['efficiency'], 100.0, unit=' %')}."
        )
    for c in case["contenders"]:
        lines += _contender_notes(c)
    lines += _missing(case)
    return lines


def _waits_for_data(c: Mapping[str, Any]) -> bool:
    return not c["is_peak"] and "data_share" in c


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
        text = f"{name}, a checkpoint holds training up for {format_spread(saves['sync_seconds'], 1e3)} ms"
        text += f" ({sync / step:.1f} iterations) when it is written on the spot"
        if "async_seconds" in saves:
            text += (
                f", for {format_spread(saves['async_seconds'], 1e3)} ms ({saves['async_seconds']['median'] / step:.1f} "
                f"iterations, {format_spread(saves['stall_share'], 100.0, unit=' %')} of that) in the background"
            )
            fastest = saves["fastest"]
            text += (
                f"; the fastest of each {short(fastest['sync_seconds'] * 1e3)} and "
                f"{short(fastest['async_seconds'] * 1e3)} ms ({short(fastest['stall_share'] * 100)} %)"
            )
        lines.append(
            f"{text}; the first in the background {short(saves['async_first_seconds'] * 1e3)} ms. An iteration beside "
            f"the writing takes {format_spread(saves['iteration_beside_seconds'], 1e3)} ms."
        )
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
    """The tables and notes of all cases and curves on a console."""
    for title, header, rows, lines in _tables(report):
        table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAVY, pad_edge=False)
        filled = _filled(rows)
        for number, name in enumerate(header):
            if number in filled:
                table.add_column(name, justify="left" if number == 0 else "right", no_wrap=len(header) == len(HEADER))
        for row in rows:
            table.add_row(*(row[number] for number in filled))
        console.print(table)
        for line in lines:
            console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
        console.print()


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]], list[str]]]:
    """`(title, header, rows, notes)`: of each case, and of each curve; a case of a sweep is a row of its curve."""
    cores, curves = report["machine"]["cores"], find_curves(report)
    for case in report["cases"]:
        if not is_in_a_curve(case, curves):
            yield case["title"], HEADER, contender_rows(case), notes(case, cores)
    for curve in curves:
        yield curve.title, *curve_table(curve), curve_notes(curve, cores)


def _ratio(c: Mapping[str, Any], name: str) -> str:
    """To the first contender of as many processes, which has none itself and is 1."""
    if c["is_peak"] or (name not in c and "ratio" in c):
        return NOT_AVAILABLE
    return format_spread(c[name]) if name in c else "1"


def _filled(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns that hold a figure. One without says nothing on a screen; the notes give the reason."""
    return [n for n in range(len(rows[0])) if any(row[n] != NOT_AVAILABLE for row in rows)]


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown, without plots."""
    parts = ["# Machine and method", "", *machine_lines(report), ""]
    for title, lines in to_sections(report):
        parts += [f"# {title}", "", *lines, ""]
    return "\n".join(parts)


def to_sections(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """`(title, lines of Markdown)` of every table with its notes; the title is that of its plots too."""
    for title, header, rows, lines in _tables(report):
        yield title, [*_markdown_table(header, rows), "", *(f"* {line}" for line in lines)]


def machine_lines(report: Mapping[str, Any]) -> list[str]:
    """What ran where and how, as a Markdown list."""
    machine, settings = report["machine"], report["settings"]
    few = [f"* **A smoke run of {settings['rounds']} rounds: its figures mean nothing.**"]
    return [
        *(few if settings["rounds"] < LEAST_ROUNDS else []),
        f"* Command: `{report['command']}`",
        f"* Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gb')} GB; "
        f"{machine.get('os')}; devices: {machine.get('devices') or 'none but the CPU'}",
        f"* Software: libai {machine.get('libai')} ({machine.get('commit')}), oneflow {machine.get('oneflow')} "
        f"(OpenBLAS {machine.get('openblas', 'bundled')}, CPU kernels {machine.get('cpu_kernels', 'its own')}; "
        f"stock contenders have those of the wheel), python {machine.get('python')}",
        f"* Load average when it began: {machine.get('load')}",
        f"* Every contender is a process of its own; they take turns, {settings['rounds']} rounds of blocks of about "
        f"{settings['block_seconds']:g} s. Figures are medians over blocks, ratios medians over rounds of paired "
        "blocks; ± is half of the 95 % interval of the median. The first iteration (`first s`), which "
        "compiles, is not among them.",
        "* `CPU ms`: processor time of an iteration, all processes added up; a busy machine changes it less. "
        "`launch s`: from the start of the command to the end of the first iteration.",
        f"* Their losses agreed in the first {settings['check_iterations']} iterations to "
        f"{settings['loss_tolerance']:g} (relative). The learning rate is constant.",
        "* RSS is the largest resident memory of the contender's processes, added up: shared pages count in each.",
    ]


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
