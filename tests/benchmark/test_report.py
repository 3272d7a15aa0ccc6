"""The report: every figure with its spread or a reason, tables, plots that exist, and the page."""

from __future__ import annotations

import io
import json
import re

import planted
import pytest
from rich.console import Console

from libai.benchmark import plots, tables
from libai.benchmark.docs_page import write_page
from libai.benchmark.report import read_report
from libai.utils.errors import UserError

TIMES = [0.010, 0.011, 0.0105, 0.0102]


def scaled(factor: float) -> list[float]:
    return [factor * seconds for seconds in TIMES]


@pytest.fixture
def report():
    """Both modes, a twin, a peak, a contender that took no part, two processes."""
    flops = {"facts": {"flops_per_iter": 10**7, "tokens_per_iter": 512}}
    graph = planted.planted("graph", scaled(0.5), "graph", first=1.5, **flops, saves={})
    graph.facts["build_seconds"] = 1.2
    absent = planted.planted("raw-graph", [], "raw-graph")
    absent.unavailable = "it clips otherwise"
    eager = planted.planted(
        "eager",
        TIMES,
        **flops,
        cpu_blocks=TIMES,
        saves={"sync": [0.1, 0.2, 0.4], "async": [0.05, 0.01, 0.02], "iteration_beside": [0.01, 0.01, 0.01]},
    )
    return planted.report_of(
        eager,
        graph,
        absent,
        planted.planted("eager (again)", scaled(1.01), twin_of="eager", **flops),
        planted.planted("gemm", scaled(1.0), "gemm", is_peak=True, facts={"flops_per_iter": 10**8}),
        planted.planted("eager x2", scaled(1.25), processes=2, facts={"global_batch_size": 16}),
    )


def contender(report, name):
    return next(c for c in report["cases"][0]["contenders"] if c["name"] == name)


def test_rates_follow_from_times(report):
    eager = contender(report, "eager")
    assert eager["samples_per_s"]["median"] == pytest.approx(8 / eager["step_seconds"]["median"], rel=1e-3)
    assert eager["tokens_per_s"]["median"] == pytest.approx(512 / eager["step_seconds"]["median"], rel=1e-3)
    # the same time as the peak's product, with a tenth of its operations
    assert eager["peak_share"]["median"] == pytest.approx(0.1)
    assert contender(report, "graph")["ratio"]["median"] == pytest.approx(0.5)


def test_noise_break_even_and_scaling_are_told(report):
    case = report["cases"][0]
    assert case["noise"]["1"]["floor"] == pytest.approx(0.01, rel=0.01)
    assert case["break_even"][0]["iterations"] == round((1.5 - 1.0 + 0.5 * 0.01035) / (0.5 * 0.01035) + 0.5)
    (scaling,) = case["scaling"]
    assert scaling["kind"] == "weak"
    assert scaling["efficiency"]["median"] == pytest.approx(0.8)


def test_a_figure_that_is_missing_has_a_reason(report):
    for c in report["cases"][0]["contenders"]:
        if c["unavailable"]:
            continue
        for figure in ("samples_per_s", "tokens_per_s", "flops_per_s", "peak_share", "cpu_seconds", "device_bytes"):
            assert (figure in c) != (figure in c["missing"]), (c["name"], figure)


def test_the_stall_in_the_background_leaves_the_first_save_out(report):
    saves = contender(report, "eager")["saves"]
    assert saves["stall_share"]["median"] == pytest.approx(0.05)
    assert saves["async_first_seconds"] == 0.05


def test_the_fastest_save_of_each_kind_is_given_beside_the_medians(report):
    fastest = contender(report, "eager")["saves"]["fastest"]
    assert fastest == {"sync_seconds": 0.1, "async_seconds": 0.01, "stall_share": pytest.approx(0.1)}


def test_the_table_shows_every_contender_and_the_notes_the_rest(report):
    out = io.StringIO()
    tables.print_report(report, Console(file=out, width=160))
    text = out.getvalue()
    for c in report["cases"][0]["contenders"]:
        assert c["name"] in text
    assert "0.5 ±" in text
    assert "raw-graph took no part: it clips otherwise." in text
    assert "device_bytes n/a" in text
    assert "waiting for data: eager 0.40%, graph 0.40%, eager (again) 0.40%, eager x2 0.40%." in text
    assert "Break-even: graph pays off after" in text
    assert "…" not in text


def test_a_report_without_a_twin_says_that_noise_is_unknown():
    report = planted.report_of(planted.planted("eager", TIMES))
    assert any("Noise: not measured" in line for line in tables.notes(report["cases"][0], 2))


def test_a_busy_machine_is_told():
    report = planted.report_of(planted.planted("eager", TIMES), loads=(1.0, 9.0))
    notes = tables.notes(report["cases"][0], cores=2)
    assert any("busy with other work" in line for line in notes)
    assert not any("busy with other work" in line for line in tables.notes(report["cases"][0], cores=16))


def test_losses_that_rounding_has_parted_are_told(report):
    case = report["cases"][0]
    parted = {"contenders": ["eager", "raw-graph"], "iteration": 7, "difference": 3.4e-3, "allowed": 0.03}
    (note,) = (line for line in tables.notes({**case, "rounding": parted}, 2) if "rounding" in line)
    assert "part by 3.4e-03 in iteration 7" in note and "parts them by 3.0e-03 there" in note
    assert not any("rounding" in line for line in tables.notes(case, 2))


def test_plots_exist_and_show_the_contenders(report, tmp_path):
    files = plots.draw(report, tmp_path)
    assert {file.name for file in files} >= {"times.png", "times.svg", "break_even.svg", "scaling.svg"}
    assert all(file.stat().st_size > 2000 for file in files)
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "times.svg").read_text()
    assert "eager (again)" in drawn and "raw-graph" not in drawn


def test_a_sweep_is_drawn_as_curves(tmp_path):
    reports = [planted.report_of(planted.planted("eager", scaled(n))) for n in (1, 2)]
    both = reports[0]
    both["cases"] += reports[1]["cases"]
    for value, case in zip(("2", "4"), both["cases"]):
        case["sweep"] = {"key": "model.num_layers", "value": value}
    files = [file.name for file in plots.draw(both, tmp_path)]
    assert "sweep_sleep.svg" in files
    assert "model.num_layers" in (tmp_path / "sweep_sleep.svg").read_text()


def test_the_page_is_made_of_reports_and_holds_no_paths(report, tmp_path):
    write_page([report, report], tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith("# Benchmarks")
    assert page.count("| eager |") == 2
    assert not re.search(r"`/\w+/", page)


def test_a_page_in_no_folder_is_refused(report, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        write_page([report], tmp_path / "nowhere" / "page.md")


def test_a_report_is_read_back_and_anything_else_is_refused(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert read_report(path) == json.loads(json.dumps(report))
    for text, words in (("{}", "no report of this version"), ("eager", "no JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_report(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_report(tmp_path / "absent.json")
