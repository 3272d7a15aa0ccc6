"""`libai doctor`."""

from __future__ import annotations

import json
import re

import pytest

from libai.cli.commands import doctor


@pytest.mark.e2e
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
        return doctor.check_gpu({"cuda": {"available": True, "devices": [{"name": "H100", "capability": [9, 0]}]}})
    if name == "launcher":
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
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
        ("gpu", "warning", "GPU 0 (H100) has compute capability 9.0"),
        ("ports", "failed", "PORT is '70000'"),
        ("launcher", "failed", "SLURM_PROCID is not set"),
    ],
)
def test_every_check_can_fail(name, status, text, monkeypatch, tmp_path):
    """Negative controls."""
    finding = checked(name, monkeypatch, tmp_path)
    assert finding.status == status and text in finding.found + finding.todo and finding.todo


def test_a_folder_that_cannot_be_written_to_fails(tmp_path):
    finding = doctor.check_disk(tmp_path / "none")
    assert finding.status == "failed" and "train.output_dir" in finding.todo
