"""Loading weights into modules: an exact report first, then a copy in place."""

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from safetensors.numpy import save_file

from libai import checkpoint
from libai.checkpoint import CheckpointError


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)


def _values(module):
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def _equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture
def saved(tmp_path):
    """A net and its checkpoint `iter_0000500`."""
    net = Net()
    return net, checkpoint.save(tmp_path, 500, {"model": net.state_dict()}, {}, shard_bytes=200)


def test_weights_and_buffers_go_into_the_same_memory(saved):
    net, path = saved
    other = Net()
    before = dict(other.named_parameters())
    report = checkpoint.load_weights(path, other)
    assert report.is_exact and len(report.loaded) == len(net.state_dict())
    assert _equal(_values(other), _values(net))
    for name, parameter in other.named_parameters():
        assert parameter is before[name] and parameter.requires_grad


def test_a_pattern_that_renames_nothing_is_named(saved):
    net, path = saved
    report = checkpoint.load_weights(path, Net(), [(r"^norm\.", "norm."), (r"^encodr\.", "")])
    assert report.is_exact and report.idle_patterns == [r"^encodr\."]
    assert str(report).endswith(
        r"\n  '^encodr\\.' of revise_keys matches no name on disk.".replace(r"\n", "\n")
    )


def test_a_mismatch_is_reported_exactly_and_nothing_is_copied(saved):
    net, path = saved
    other = Net(classes=7)
    other.extra = nn.Linear(1, 1, bias=False)
    before = _values(other)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_weights(path, other, [(r"^norm\.(?=running)", "old.")])
    assert str(error.value) == (
        "checkpoint `iter_0000500`: 5 tensors fit, 3 missing, 2 unexpected, 2 mismatched. "
        "`train.load_weight` with `strict=false` loads the tensors that fit; `revise_keys` "
        "renames tensors.\n  missing: `extra.weight`, `norm.running_mean`, `norm.running_var` (in "
        "the model, not on disk).\n  unexpected: `old.running_mean`, `old.running_var` (on disk, "
        "not in the model).\n  mismatched: `head.bias` is (10,) on disk, (7,) in the model, "
        "`head.weight` is (10, 8) on disk, (7, 8) in the model."
    )
    assert _equal(_values(other), before)


def test_names_are_mapped_in_order(saved):
    net, path = saved

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(4, 8)

    wrapped = Wrapped()
    pairs = [[r"^(norm|head)\..*", ""], (r"^body\.", "x."), (r"^x", "backbone")]
    assert checkpoint.load_weights(path, wrapped, pairs).is_exact
    assert np.array_equal(wrapped.backbone.weight.numpy(), net.body.weight.numpy())


@pytest.mark.parametrize(
    "mapping, expected",
    [
        ([("(", "x")], "revise_keys is not valid"),
        ([("a", r"\9")], "is not valid"),
        ([(".*", "x")], "renames both"),
        *((wrong, "not a pair of strings") for wrong in (["^body"], "ab", [["^body", 3]])),
    ],
)
def test_a_bad_mapping_is_an_error(saved, mapping, expected):
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.load_weights(saved[1], Net(), mapping)


@pytest.mark.parametrize(
    "form", ["root", "run", "best", "file", "index", "foreign folder", "foreign shards"]
)
def test_every_kind_of_source_is_read(saved, tmp_path, form):
    net, path = saved
    checkpoint.mark_best(tmp_path, path, "m", 1.0)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    source = {
        "root": tmp_path,
        "run": tmp_path / "run",
        "best": tmp_path / "best",
        "file": foreign / "any.safetensors",
    }.get(form, foreign)
    if form == "index":
        source = path / "model.safetensors.index.json"
    elif form == "file":
        save_file(_values(net), source)
    elif form == "foreign folder":
        save_file(_values(net), foreign / "model.safetensors")
    elif form == "foreign shards":
        for file in path.glob("model*"):
            (foreign / file.name).write_bytes(file.read_bytes())
    other = Net()
    checkpoint.load_weights(source, other)
    assert _equal(_values(other), _values(net))


def test_a_source_that_is_none_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.open_weights(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match="contains neither manifest.json nor model.safetensors"
    ):
        checkpoint.open_weights(tmp_path)
    path = checkpoint.save(tmp_path, 1, {"optimizer": {"a": np.ones(1)}}, {})
    with pytest.raises(CheckpointError, match="has no tensor group 'model'; it has optimizer"):
        checkpoint.open_weights(path)


@pytest.mark.parametrize("writer", ["flow", "torch", "pickle"])
@pytest.mark.parametrize("reader", ["load_weights", "resolve", "load", "verify"])
def test_weights_of_flow_save_are_refused_with_the_way(writer, reader, tmp_path):
    """None of them may be unpickled: the file of this test would write another one."""
    path, ran = tmp_path / "old.pth", tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return Path.touch, (ran,)

    if writer == "flow":
        flow.save(Net().state_dict(), str(path))
        (path / "pickled_data").write_bytes(pickle.dumps(Runs()))
    elif writer == "torch":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("data.pkl", pickle.dumps(Runs()))
    else:
        path.write_bytes(pickle.dumps(Runs()))
    read = {"load_weights": lambda one: checkpoint.load_weights(one, Net())}
    try:
        text = str(read.get(reader, getattr(checkpoint, reader))(path))  # `verify` returns it
    except CheckpointError as error:
        text = str(error)
    program = "flow" if writer == "flow" else "torch"
    assert f"{path} was written by {program}.save" in text
    if (writer, reader) == ("torch", "load_weights"):  # this reads dicts of tensors
        assert "In PyTorch, save only model.state_dict() in it." in text
    else:
        assert f"load_weights({program}.load('{path}'), model)" in text
    assert not ran.exists()


@pytest.mark.parametrize("length", [0x80, 0x4B50])
def test_a_safetensors_file_that_begins_like_a_pickle_is_read(length, tmp_path):
    """The first bytes of a file are the length of its header."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    path = tmp_path / "weights.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length).encode() + b"\x07")
    assert checkpoint.open_weights(path)["w"].tolist() == [7]


def test_weights_are_taken_from_a_dict_as_from_a_file():
    """mmengine's `load_model_state_dict`."""
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    found = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"the given tensors(?s:.*)module\.weight"):
        checkpoint.load_weights(found, target)
    report = checkpoint.load_weights(found, target, revise_keys=[(r"^module\.", "")])
    assert report.is_exact
    np.testing.assert_array_equal(target.weight.numpy(), source.weight.numpy())
