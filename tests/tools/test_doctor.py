"""`libai doctor`."""

import json
import re

import pytest

from libai.cli.commands import doctor


@pytest.mark.e2e
def test_the_doctor_checks_this_environment(capsys):
    assert doctor.run(["--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == ["oneflow", "kernels", "openblas", "disk", "gpu"]
    assert found["oneflow"]["status"] == "ok" and found["oneflow"]["found"].startswith(
        "0.9.0 (numpy 1."
    )
    assert all(bool(row["todo"]) == (row["status"] != "ok") for row in found.values())


def test_what_fails_ends_it_with_1_and_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor,
        "_look",
        lambda: (None, "oneflow is not installed in /x. Run `pip install -e .` there."),
    )
    assert doctor.run([]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^failed   oneflow   `import oneflow` fails on Python 3\S+: oneflow is not", said, re.M
    )
    assert "kernels" not in said and re.search(r"^ok +gpu ", said, re.M)


#: facts with which every check that reads them has something to say
WRONG = {
    "oneflow": {
        "version": "0.9.0",
        "cpu_kernels": "oneflow's own",
        "openblas": "bundled",
    },
    "packages": {"numpy": "1.23.5", "protobuf": "3.20.3"},
    "cuda": {"available": True, "devices": [{"name": "H100", "capability": [9, 0]}]},
}


def test_every_check_can_fail(monkeypatch):
    """Negative controls."""
    monkeypatch.setattr(doctor, "_look", lambda: (WRONG, ""))
    monkeypatch.setattr(doctor, "_LOW_DISK", 1e18)
    found = {finding["name"]: finding for finding in doctor.examine()}
    assert found.pop("oneflow")["status"] == "ok"
    assert {finding["status"] for finding in found.values()} == {"warning"}
    for name, text in {
        "kernels": "oneflow's own",
        "openblas": "pip install scipy-openblas32",
        "disk": "train.output_dir",
        "gpu": "GPU 0 (H100) has compute capability 9.0",
    }.items():
        assert text in found[name]["found"] + found[name]["todo"]


def test_a_folder_that_cannot_be_written_to_fails(tmp_path):
    finding = doctor.check_disk(tmp_path / "none")
    assert finding["status"] == "failed" and "train.output_dir" in finding["todo"]
