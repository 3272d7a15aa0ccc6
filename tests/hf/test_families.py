"""Every architecture gives the outputs of `transformers` and exports its files byte for byte (see
`make_fixtures.py`)."""

import json
import shutil

import numpy as np
import pytest
from hf_folders import FIXTURES

from libai.checkpoint import CheckpointError
from libai.checkpoint.reader import open_safetensors
from libai.checkpoint.tensor_files import TensorSpec, write_tensors
from libai.hf import export_folder, import_folder, model_config
from libai.hf.families import family_of
from libai.hf.verify import compute, differences

NAMES = sorted(path.name for path in FIXTURES.iterdir())


def same_bytes(one, other):
    return one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_transformers(name):
    arrays = dict(np.load(FIXTURES / name / "reference.npz"))
    expected = {
        key.removeprefix("out_"): arrays.pop(key) for key in list(arrays) if key.startswith("out_")
    }
    found = compute(FIXTURES / name, arrays)
    assert expected.keys() <= found.keys()
    for output, difference in differences(found, expected).items():
        # a few units in the last place of the largest value, which is between 1 and 40
        assert difference <= 1e-6 * max(10.0, np.abs(expected[output]).max()), output


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_give_the_same_bytes(name, tmp_path):
    source, ours, back = FIXTURES / name, tmp_path / "ours", tmp_path / "back"
    assert import_folder(source, ours).is_exact
    files = export_folder(ours, back, like=source)
    assert {"config.json"} < set(files) and all(
        same_bytes(back / file, source / file) for file in files
    )
    assert {path.name for path in source.iterdir()} - set(files) == {"reference.npz"}


@pytest.mark.parametrize("name", ["bert", "gpt2", "roberta"])
def test_export_without_an_example_writes_what_transformers_would(name, tmp_path):
    import_folder(FIXTURES / name, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "back")
    assert same_bytes(tmp_path / "back/model.safetensors", FIXTURES / name / "model.safetensors")


def test_missing_and_unexpected_names_are_those_of_the_file(tmp_path):
    source = FIXTURES / "qwen2"
    tensors = open_safetensors(source / "model.safetensors")
    arrays = {name: tensors[name] for name in tensors}
    arrays["model.layers.9.self_attn.q_proj.bias"] = arrays.pop(
        "model.layers.1.self_attn.q_proj.bias"
    )
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:5]
    specs = {name: TensorSpec("float32", array.shape) for name, array in arrays.items()}
    shutil.copy(source / "config.json", tmp_path)
    write_tensors(tmp_path / "model.safetensors", specs, arrays)
    with pytest.raises(CheckpointError) as caught:
        import_folder(tmp_path, tmp_path / "ours")
    report = str(caught.value)
    assert "1 missing, 1 unexpected, 1 mismatched" in report
    assert "missing: `model.layers.1.self_attn.q_proj.bias`" in report
    assert "unexpected: `model.layers.9.self_attn.q_proj.bias`" in report
    assert "mismatched: `model.norm.weight` is (5,) on disk, (24,) in the model" in report
    assert not (tmp_path / "ours").exists()


def test_a_config_is_written_as_it_is_read(tmp_path):
    """The model of a run that is exported is the model that was trained."""
    for name in NAMES:
        config = json.loads((FIXTURES / name / "config.json").read_text())
        family = family_of(config)
        arguments = family.read_arguments(config)
        written = family.write_config(config["architectures"][0], arguments)
        assert family.read_arguments(written) == arguments, name


def test_arguments_can_be_replaced():
    assert model_config(FIXTURES / "llama", max_seq_length=8).max_seq_length == 8
