"""`libai doctor` and `plot`."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from libai.cli.commands import doctor
from libai.cli.commands.runs import drawing, plot, records
from libai.utils.errors import UserError

# ---------------------------------------------------------------------------------------------------- doctor

FACTS = {
    "oneflow": {"version": "0.9.0", "cpu_kernels": "libai's for avx2", "openblas": "0.3.30"},
    "packages": {"numpy": "1.26.4", "protobuf": "3.20.3"},
    "cuda": {"available": False, "devices": []},
}


def test_the_doctor_checks_this_environment(capsys, tmp_path):
    assert doctor.run(["--json", "--folder", str(tmp_path)]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    names = ["python", "oneflow", "kernels", "openblas", "compiler", "threads", "memory", "disk", "ports"]
    names += ["launcher", "gpu"]
    assert list(found) == names
    assert found["oneflow"]["status"] == "ok" and found["oneflow"]["found"].startswith("0.9.0 (numpy 1.")
    assert all(bool(row["todo"]) == (row["status"] != "ok") for row in found.values())


def test_what_fails_ends_it_with_1_and_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "_look", lambda: (None, "oneflow is not installed in /x. Run `pip install -e .` there.")
    )
    assert doctor.run([]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^failed   oneflow   `import oneflow` fails: oneflow is not installed in /x\. Run", said, re.M)
    assert "kernels" not in said and re.search(r"^ok +python ", said, re.M)


def test_the_error_of_an_import_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "_LOOK", "import sys; sys.exit('Error: no such library')")
    assert doctor._look() == (None, "Error: no such library")


def checked(name: str, monkeypatch, tmp_path) -> doctor.Finding:
    """The finding of a check where its one condition is broken."""
    if name == "kernels":
        return doctor.check_kernels({"oneflow": {"cpu_kernels": "oneflow's own (no g++)"}})
    if name == "openblas":
        return doctor.check_openblas({"oneflow": {"openblas": "bundled"}})
    if name == "compiler":
        monkeypatch.setattr(doctor, "find_compiler", lambda: None)
        return doctor.check_compiler()
    if name == "threads":
        return doctor.check_threads({"OMP_NUM_THREADS": "100000"})
    if name == "memory":
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (10**9, 10**9))
        return doctor.check_memory()
    if name == "disk":
        monkeypatch.setattr(doctor, "_LOW_DISK", 1e18)
        return doctor.check_disk(tmp_path)
    if name == "gpu":
        monkeypatch.setattr(doctor.gpu, "check_gpu", lambda: "H100 cannot be used")
        return doctor.check_gpu(FACTS)
    if name == "launcher":
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        return doctor.check_launcher()
    monkeypatch.setenv("PORT", "70000")
    return doctor.check_ports()


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("kernels", "warning", "oneflow's own (no g++)"),
        ("openblas", "warning", "pip install scipy-openblas32"),
        ("compiler", "warning", "no g++ or clang++"),
        ("threads", "warning", "unset OMP_NUM_THREADS"),
        ("memory", "warning", "ulimit -v unlimited"),
        ("disk", "warning", "train.output_dir"),
        ("gpu", "warning", "H100 cannot be used"),
        ("ports", "failed", "PORT is '70000'"),
        ("launcher", "failed", "Set NODE in its manifest"),
    ],
)
def test_every_check_can_fail(name, status, text, monkeypatch, tmp_path):
    """Negative controls."""
    finding = checked(name, monkeypatch, tmp_path)
    assert finding.status == status and text in finding.found + finding.todo and finding.todo


def test_a_folder_that_cannot_be_written_to_fails(tmp_path):
    finding = doctor.check_disk(tmp_path / "none")
    assert finding.status == "failed" and "train.output_dir" in finding.todo


def test_another_oneflow_is_a_warning():
    facts = {**FACTS, "oneflow": {**FACTS["oneflow"], "version": "0.9.1"}}
    assert doctor.check_oneflow(FACTS, "").status == "ok"
    assert doctor.check_oneflow(facts, "").status == "warning"
    with_gpu = {**FACTS, "cuda": {"available": True, "devices": [{"name": "A100", "capability": [8, 0]}]}}
    assert doctor.check_gpu(with_gpu).found == "A100 (8.0)"
    assert replace(doctor.check_gpu(FACTS), name="") == doctor.Finding("", "ok", "none; training runs on the CPU")


# ------------------------------------------------------------------------------------------------------- plot


@pytest.fixture
def a_run(tmp_path):
    rows = [{"iter": 1, "train/loss": 2.0}, {"iter": 2, "train/loss": 1.0, "eval/val/loss": 1.5}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"iter": 3, "tr')
    return tmp_path / "run"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_curves_are_drawn(a_run, tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    output = tmp_path / f"curves.{suffix}"
    assert plot.run([str(a_run), str(a_run), "--tag", "train/loss", "--tag", "eval/val/loss", "-o", str(output)]) == 0
    assert output.read_bytes().startswith(start)
    assert records.read_curves(a_run) == {"train/loss": ([1, 2], [2.0, 1.0]), "eval/val/loss": ([2], [1.5])}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["RUN", "--tag", "x"], "--tag x: no run has such a metric. There are train/loss, eval/val/loss."),
        (["RUN", "-o", "curves.bmp"], "it must end in .png or .svg"),
        (["nowhere"], "nowhere holds no metrics"),
    ],
)
def test_what_cannot_be_drawn(a_run, words, text):
    with pytest.raises(UserError, match=re.escape(text)):
        plot.run([str(a_run) if word == "RUN" else word for word in words])


def test_without_matplotlib_it_says_so(a_run, monkeypatch):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="not installed. Run `pip install matplotlib`"):
        plot.run([str(a_run)])
