"""`libai checkpoint` lists, verifies, compares and converts checkpoints."""

import json
import sys

import numpy as np
import pytest
from safetensors import safe_open

from libai import checkpoint
from libai.cli.main import dispatch
from libai.launch.guard import run_guarded


@pytest.fixture
def root(tmp_path):
    """Checkpoints of iterations 1 to 3; 2 is the best."""
    root = tmp_path / "root"
    for i in (1, 2, 3):
        tensors = {
            "model": {"w": np.full((3, 4), i - 2**-10, np.float32), "n": np.arange(3)},
            "optimizer": {"w/m": np.ones(12)},
        }
        checkpoint.save(root, i, tensors, {"lr": i / 10}, shard_bytes=50)
    checkpoint.mark_best(root, root / "iter_0000002", "eval/val/loss", 1.5)
    return root


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the tool; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["libai"])  # dispatch changes it

    def call(*arguments):
        code = run_guarded(lambda: dispatch(["checkpoint", *map(str, arguments)]))
        return code, *capsys.readouterr()

    return call


def _damage(path):
    (path / "trainer.json").write_text("{}")


def test_ls_and_verify_show_health_and_best(root, run, caplog):
    code, out, _ = run("ls", root)
    assert (
        code == 0 and len(out.splitlines()) == 3 and "best eval/val/loss=1.5" in out.splitlines()[1]
    )
    assert run("verify", root, root / "iter_0000001")[0] == 0
    (root / "best.json").write_text("x")
    code, out, _ = run("ls", root)
    assert (code, out.count("iter_")) == (0, 3) and "best.json" in out + caplog.text
    _damage(root / "iter_0000003")
    code, out, _ = run("ls", root, "--json")
    rows = json.loads(out)
    assert code == 1
    assert [bool(row["problems"]) for row in rows] == [False, False, True]
    code, out, _ = run("verify", root)
    assert (
        code == 1
        and "iter_0000003: damaged" in out
        and "trainer.json" in out
        and "iter_0000002: ok" in out
    )


def test_diff_tells_what_differs(root, run):
    code, out, _ = run("diff", root / "iter_0000001", root / "iter_0000002")
    assert code == 1
    assert out.splitlines() == [
        "iteration: 1 and 2",
        "model/w: 12 of 12 values differ, by at most 1",
        "state.lr: 0.1 and 0.2",
    ]
    assert run("diff", root / "best", root / "iter_0000002")[:2] == (0, "equal\n")


def test_convert_exports_weights_as_one_file(root, run, tmp_path):
    code, out, errors = run("convert", root / "last", "out.safetensors", "--dtype", "bfloat16")
    assert code == 0, errors
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert sorted(file.keys()) == ["n", "w"]
        assert (
            file.get_slice("w").get_dtype() == "BF16" and file.get_slice("n").get_dtype() == "I64"
        )
    # rounded, not cut off
    assert (checkpoint.open_weights(tmp_path / "out.safetensors")["w"] == 3).all()
    assert run("convert", root / "last", "out.safetensors")[0] == 2  # never overwrites
    assert list(tmp_path.glob(".out*")) == []


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["ls", "nowhere"], "nowhere is not a folder"),
        (["diff", "nowhere", "root"], "nowhere does not exist"),
        (["convert", "root/iter_0000001", "root"], "exists already"),
        (["convert", "root", "weights"], "is not the name of a safetensors file"),
        (["frobnicate"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(root, run, arguments, expected):
    code, _, errors = run(*arguments)
    assert code == 2 and expected in errors and "Traceback" not in errors
