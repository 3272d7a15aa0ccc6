"""The report: every figure with its spread or a reason, tables, plots that exist, and the page."""

from __future__ import annotations

import json
import re

import planted
import pytest

from libai.benchmark import plots, tables
from libai.benchmark.report import find_curves, read_report
from libai.benchmark.tables import curve_notes, curve_table, write_page
from libai.utils.errors import UserError

TIMES = [0.010, 0.011, 0.0105, 0.0102]


def scaled(factor: float) -> list[float]:
    return [factor * seconds for seconds in TIMES]


@pytest.fixture
def report():
    """Both modes, a twin, a peak, a variant that took no part, two processes."""
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


def test_a_figure_that_is_missing_has_a_reason(report):
    for c in report["cases"][0]["variants"]:
        if c["unavailable"]:
            continue
        figures = ["samples_per_s", "tokens_per_s", "flops_per_s", "cpu_seconds", "data_share"]
        for figure in figures + ["peak_share"] * (not c["is_peak"]):
            assert (figure in c) != (figure in c["missing"]), (c["name"], figure)


def test_the_stall_in_the_background_leaves_the_first_save_out(report):
    saves = variant(report, "eager")["saves"]
    assert saves["stall_share"]["median"] == pytest.approx(0.05)
    assert saves["async_first_seconds"] == 0.05


def test_the_fastest_save_of_each_kind_is_given_beside_the_medians(report):
    fastest = variant(report, "eager")["saves"]["fastest"]
    assert fastest == {"sync_seconds": 0.1, "async_seconds": 0.01, "stall_share": pytest.approx(0.1)}


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


def cells_of(table: list[str]) -> list[list[str]]:
    """The header and the rows of a table in Markdown."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [head, *rows]


def text_of(report) -> str:
    return "\n".join(line for title, lines in tables.to_sections(report) for line in [title, *lines])


def test_a_report_without_a_twin_says_that_noise_is_unknown():
    report = planted.report_of(planted.planted("eager", TIMES))
    assert any("Noise: not measured" in line for line in tables.case_notes(report["cases"][0], 2))


def test_a_busy_machine_is_told():
    report = planted.report_of(planted.planted("eager", TIMES), loads=(1.0, 9.0))
    notes = tables.case_notes(report["cases"][0], cores=2)
    assert any("busy with other work" in line for line in notes)
    assert not any("busy with other work" in line for line in tables.case_notes(report["cases"][0], cores=16))


def test_losses_that_diverge_by_rounding_are_told(report):
    case = report["cases"][0]
    diverged = {"variants": ["eager", "raw-graph"], "iteration": 7, "difference": 3.4e-3, "allowed": 0.03}
    (note,) = (line for line in tables.case_notes({**case, "rounding": diverged}, 2) if "rounding" in line)
    assert "diverge by 3.4e-03 in iteration 7" in note and "makes 3.0e-03 there" in note
    assert not any("rounding" in line for line in tables.case_notes(case, 2))


def test_plots_exist_and_show_the_variants(report, tmp_path):
    names = [c["name"] for c in report["cases"][0]["variants"]]
    report["cases"][0]["variants"].pop(names.index("eager x2"))
    files = [file for found in plots.draw(report, tmp_path).values() for file in found]
    assert {file.name for file in files} == {"times.svg", "break_even.svg"}
    assert all(file.stat().st_size > 2000 for file in files)
    drawn = (tmp_path / "times.svg").read_text()
    assert "eager (again)" in drawn and "raw-graph" not in drawn


def test_a_sweep_is_drawn_as_curves(tmp_path):
    reports = [planted.report_of(planted.planted("eager", scaled(n))) for n in (1, 2)]
    both = reports[0]
    both["cases"] += reports[1]["cases"]
    for value, case in zip(("2", "4"), both["cases"]):
        case["sweep"] = {"key": "model.num_layers", "value": value}
    files = [file.name for found in plots.draw(both, tmp_path).values() for file in found]
    assert files == ["curve_sleep_num_layers.svg"]


def test_the_page_is_made_of_reports_and_holds_no_paths(report, tmp_path):
    write_page([report, report], tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith("# Benchmarks")
    assert page.count("A smoke run of 2 rounds") == 1
    assert len(re.findall(r"^\| eager +\|", page, re.MULTILINE)) == 2
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


def swept(report_of_value, key="train.num_accumulation_steps"):
    """A report of a sweep: value -> the report of its one case."""
    first, *others = report_of_value.values()
    first["cases"] += [case for report in others for case in report["cases"]]
    for value, case in zip(report_of_value, first["cases"]):
        case.update(sweep={"key": key, "value": value}, title=f"sleep.py {key}={value}", overrides=[f"{key}={value}"])
    return first


def variants_at(factor):
    return planted.planted("eager", scaled(factor)), planted.planted("graph", scaled(2 * factor), "graph", first=3.0)


def test_a_sweep_is_one_table_with_a_row_for_each_value():
    report = swept({"1": planted.report_of(*variants_at(1.0)), "4": planted.report_of(*variants_at(1.08))})
    (curve,) = find_curves(report)
    header, *rows = cells_of(curve_table(curve))
    assert header == [
        "accumulation (micro-batches per iteration)",
        *("eager, ms/iter", "graph, ms/iter", "graph / eager", "eager, samples/s", "graph, samples/s"),
        *("eager, cost to 1", "graph, cost to 1", "graph, first s"),
    ]
    assert [row[0] for row in rows] == ["1", "4"]
    assert rows[0][1].startswith("10.4 ±") or rows[0][1].startswith("10.3 ±")
    assert rows[1][3].startswith("2 ±"), "graph / eager, paired"
    # 1.08 times the time of one big batch, with the uncertainties of both: half widths of 4 % each here
    assert [row[6].split(" %")[0] for row in rows] == ["n/a", "+8.0"]
    text = text_of(report)
    assert not re.search(r"^\| eager", text, re.MULTILINE) and re.search(r"^\| 4 +\|", text, re.MULTILINE)
    assert any("one after the other" in line for line in curve_notes(curve, 2))


def test_other_sweeps_name_no_cost_although_the_batch_stays():
    at = {"1": planted.report_of(*variants_at(1.0)), "4": planted.report_of(*variants_at(3.0))}
    (curve,) = find_curves(swept(at, "model.num_layers"))
    assert not any("cost" in title for title in cells_of(curve_table(curve))[0])
    assert curve.label == "layers"


def test_processes_are_a_curve_of_one_case(report):
    (curve,) = find_curves(report)
    assert (curve.key, curve.kind, curve.values) == ("processes", "weak", ("1", "2"))
    assert [c and c["name"] for c in curve.lines["eager"]] == ["eager", "eager x2"]
    assert curve.lines["graph"][1] is None
    header, *rows = cells_of(curve_table(curve))
    assert rows[1][header.index("eager, efficiency")].startswith("80 % ±")


def test_a_curve_shows_variants_units_and_all_values(tmp_path):
    at = {n: planted.report_of(*variants_at(float(n))) for n in ("2", "4", "8")}
    files = plots.draw(swept(at, "model.num_layers"), tmp_path)
    (file,) = (file for found in files.values() for file in found)
    assert file.name == "curve_sleep_num_layers.svg"
    drawn = file.read_text()
    for text in ("layers", "ms per iteration", "samples/s", ">eager<", ">graph<", ">2<", ">4<", ">8<"):
        assert text in drawn, text


def test_a_page_has_its_plots_beside_it_and_drops_old_ones(report, tmp_path):
    page = tmp_path / "page.md"
    images = tmp_path / "images" / "page"
    images.mkdir(parents=True)
    (images / "run9_times.svg").write_text("old")
    (images / "mine.svg").write_text("not ours")
    sweep = swept({n: planted.report_of(*variants_at(float(n))) for n in ("1", "2")}, "model.num_layers")
    drawn = write_page([report, sweep], page, "Curves")
    text = page.read_text()
    assert text.startswith("# Curves\n")
    links = re.findall(r"\]\((images/[^)]+)\)", text)
    assert links == [str(file.relative_to(tmp_path)) for file in drawn]
    assert {file.name for file in images.iterdir()} == {"mine.svg", *(file.name for file in drawn)}
    assert "images/page/run2_curve_sleep_num_layers.svg" in links
    assert text.count("* Machine:") == 1, "what all runs share stands once"
    before = {file: file.read_bytes() for file in drawn}
    write_page([report, sweep], page, "Curves")
    assert before == {file: file.read_bytes() for file in drawn}, "the same report gives the same bytes"
