"""tools/benchmark_docs.sh: pages with plots from nothing but runs, within a time limit, and clear refusals."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest

SCRIPT = str(jobs.ROOT / "tools" / "benchmark_docs.sh")


def benchmark_docs(folder: Path, *arguments: str) -> jobs.Finished:
    folders = ["--docs", str(folder), "--reports", str(folder / "reports")]
    return jobs.run(["bash", SCRIPT, *folders, *arguments], timeout=200)


@pytest.mark.slow
def test_a_page_of_configs_is_measured_and_written(tmp_path):
    result = benchmark_docs(tmp_path, "--quick", "--only", "benchmarks", str(jobs.ROOT / "configs" / "mlp_digits.py"))
    assert result.returncode == 0, result
    page = (tmp_path / "benchmarks.md").read_text()
    assert "### configs/mlp_digits.py optim.params=null" in page
    for variant in ("eager", "graph", "eager (again)"):
        assert re.search(rf"^\| {re.escape(variant)} +\|", page, re.MULTILINE)
    assert re.search(r"waiting for data: eager \d+\.\d\d%, graph \d+\.\d\d%", page)
    links = re.findall(r"\]\((images/\S+)\)", page)
    assert links == [f"images/benchmarks/run1_{plot}.svg" for plot in ("times", "break_even")]
    assert all((tmp_path / link).stat().st_size > 2000 for link in links)
    assert str(tmp_path) not in page and str(jobs.ROOT) not in page
    assert not (tmp_path / "benchmarks_curves.md").exists()


@pytest.mark.launch
@pytest.mark.slow
def test_processes_are_measured_and_drawn(tmp_path):
    result = benchmark_docs(tmp_path, "--quick", "--only", "scaling")
    assert result.returncode == 0, result
    page = (tmp_path / "benchmarks_scaling.md").read_text()
    for kind in ("weak", "strong"):
        assert f"### configs/gpt_stdlib.py: {kind} scaling" in page
        assert (
            (tmp_path / "images" / "benchmarks_scaling")
            .joinpath(f"run{1 if kind == 'weak' else 2}_curve_gpt_stdlib_processes_{kind}.svg")
            .is_file()
        )
    assert len(re.findall(r"^\| 2 +\|.*% ±", page, re.MULTILINE)) == 2, "efficiency of two processes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "everything"], "benchmarks, curves or scaling"),
        (["--slow"], "there is no option --slow"),
        (["--minutes", "0"], "a whole number of at least 1"),
        (["--torch-python"], "needs a value"),
        (["--docs", "/no/such/folder"], "there is no folder"),
    ],
)
def test_mistakes_are_named_at_once(arguments, words, tmp_path):
    result = benchmark_docs(tmp_path, *arguments)
    assert result.returncode == 2, result
    assert words in result.stderr


def test_a_config_that_fails_ends_it_and_writes_no_page(tmp_path):
    result = benchmark_docs(tmp_path, "--quick", "--only", "benchmarks", "configs/no_such_config.py")
    assert result.returncode == 2, result
    assert "no_such_config ended with exit code 2" in result.stderr
    assert not (tmp_path / "benchmarks.md").exists()
