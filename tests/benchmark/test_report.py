"""The report: every figure with its spread or a reason, the table and its notes, and the page."""

from __future__ import annotations

import planted
import pytest

from libai.benchmark import tables

TIMES = [0.010, 0.011, 0.0105, 0.0102]


def scaled(factor: float) -> list[float]:
    return [factor * seconds for seconds in TIMES]


@pytest.fixture
def report():
    """Both modes, a twin, a peak, a variant that took no part, two processes."""
    flops = {"facts": {"flops_per_iter": 10**7, "tokens_per_iter": 512}}
    graph = planted.planted("graph", scaled(0.5), "graph", first=1.5, **flops)
    graph.facts["build_seconds"] = 1.2
    absent = planted.planted("raw-graph", [], "raw-graph")
    absent.unavailable = "it clips otherwise"
    eager = planted.planted("eager", TIMES, **flops, cpu_blocks=TIMES)
    return planted.report_of(
        eager,
        graph,
        absent,
        planted.planted("eager (again)", scaled(1.01), twin_of="eager", **flops),
        planted.planted("gemm", scaled(1.0), "gemm", is_peak=True, facts={"flops_per_iter": 10**8}),
        planted.planted("eager x2", scaled(1.25), processes=2, facts={"global_batch_size": 16}),
    )


def variant(report, name):
    return next(c for c in report["cases"][0]["variants"] if c["name"] == name)


def test_rates_follow_from_times(report):
    eager = variant(report, "eager")
    assert eager["samples_per_s"]["median"] == pytest.approx(8 / eager["step_seconds"]["median"], rel=1e-3)
    assert eager["tokens_per_s"]["median"] == pytest.approx(512 / eager["step_seconds"]["median"], rel=1e-3)
    # the same time as the peak's product, with a tenth of its operations
    assert eager["peak_share"]["median"] == pytest.approx(0.1)
    assert variant(report, "graph")["ratio"]["median"] == pytest.approx(0.5)


def test_noise_break_even_and_scaling_are_told(report):
    case = report["cases"][0]
    assert case["noise"]["1"]["floor"] == pytest.approx(0.01, rel=0.01)
    assert case["break_even"][0]["iterations"] == round((1.5 - 1.0 + 0.5 * 0.01035) / (0.5 * 0.01035) + 0.5)
    (scaling,) = case["scaling"]
    assert scaling["kind"] == "weak"
    assert scaling["efficiency"]["median"] == pytest.approx(0.8)


def test_the_table_shows_every_variant_and_the_notes_the_rest(report):
    text = text_of(report)
    for c in report["cases"][0]["variants"]:
        assert c["name"] in text
    assert "0.5 ±" in text
    assert "raw-graph took no part: it clips otherwise." in text
    assert "flops_per_s n/a for eager x2: no trainer took part that counts them." in text
    assert "waiting for data: eager 0.40%, graph 0.40%, eager (again) 0.40%, eager x2 0.40%." in text
    assert "Break-even: graph pays off after" in text
    heads = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({len(line) for line in heads[:7]}) == 1, "columns stand in line on a screen"


def text_of(report) -> str:
    return "\n".join(line for title, lines in tables.to_sections(report) for line in [title, *lines])


def test_the_page_has_the_machine_and_every_case(report, tmp_path):
    tables.write_page(report, tmp_path / "report.md")
    page = (tmp_path / "report.md").read_text()
    assert "A smoke run of 2 rounds" in page and "* Machine: a CPU, 2 cores" in page
    assert "## sleep.py\n\n| variant " in page and "Noise with 1 process(es)" in page
