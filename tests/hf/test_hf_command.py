"""`libai hf`: files, output and exit codes."""

import numpy as np
import pytest
from hf_folders import FIXTURES
from refusals import refused
from safetensors.numpy import load_file, save_file
from toy import are_equal

from libai.cli.commands.hf import run as main
from libai.hf.verify import compute, random_inputs, read_folder

QWEN2 = FIXTURES / "qwen2"


def test_averages_are_exported_where_they_are_asked_for(tmp_path):
    main(["import", str(QWEN2), str(tmp_path / "ours")])
    weights = load_file(tmp_path / "ours/model.safetensors")
    save_file({"norm.weight": weights["norm.weight"] * 2}, tmp_path / "ours/ema.safetensors")
    main(
        [
            "export",
            str(tmp_path / "ours"),
            str(tmp_path / "back"),
            "--like",
            str(QWEN2),
            "--average",
        ]
    )
    found = load_file(tmp_path / "back/model.safetensors")
    expected = load_file(QWEN2 / "model.safetensors")
    expected["model.norm.weight"] *= 2
    assert are_equal(found, expected)


@pytest.fixture
def other_python(tmp_path):
    """Stands for an interpreter with transformers, which computes what is in `answer.npz`."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncp "{tmp_path}/answer.npz" "$4"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("distance, code", [(0.0, 0), (1e-4, 1)])
def test_verify(distance, code, other_python, capsys):
    outputs = compute(QWEN2, random_inputs(read_folder(QWEN2).config))
    np.savez(
        other_python.with_name("answer.npz"),
        **{name: array + distance for name, array in outputs.items()},
    )
    assert main(["verify", str(QWEN2), "--python", str(other_python)]) == code
    assert ("equal\n" in capsys.readouterr().out) == (code == 0)


def test_verify_says_why_there_is_no_reference(other_python):
    with refused("could not compute the reference: cp: .*answer.npz"):
        main(["verify", str(QWEN2), "--python", str(other_python)])
