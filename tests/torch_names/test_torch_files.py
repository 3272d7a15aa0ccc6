"""PyTorch files, which these tests write from texts, compute what PyTorch has computed.

The recorded values come from PyTorch 2.13; expressions.txt and training.txt renew them.
different.json has the expressions with other values, with reasons.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from refusals import refused
from toy import flat_weights, trainer_of

from libai.config import LazyCall, LazyConfig, instantiate
from libai.config.loader import make_importable
from libai.patches.wrapping import replaced
from libai.torch_names import TorchTask, torch_files

HERE = Path(__file__).parent
LOSSES = json.loads((HERE / "models.json").read_text())


@pytest.fixture
def load(tmp_path):
    """Return a function that imports a file of this folder, or another text, as a PyTorch file."""
    make_importable(tmp_path)

    def load_file(name, text=None):
        text = text or (HERE / f"{name}.txt").read_text()
        module = Path(name).name
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop(module, None)
        with torch_files():
            return importlib.import_module(module)

    return load_file


@pytest.mark.parametrize(
    "kind, expected",
    [("expressions", 980), pytest.param("gradients", 450, marks=pytest.mark.nightly)],
)
def test_no_expression_differs_silently(kind, expected, load):
    recorded = json.loads((HERE / f"{kind}.json").read_text())
    different, count = load("expressions").differences(recorded, kind)
    assert set(different) == set(json.loads((HERE / "different.json").read_text())[kind])
    assert count > expected


@pytest.mark.parametrize("name", LOSSES)
def test_models_train_as_in_pytorch(name, load):
    found = load("training").losses(load(f"models/{name}"))
    assert_allclose(found, LOSSES[name], rtol=1e-9)  # float64; rounding grows with the updates


def test_transformers_compute_as_in_pytorch(load):
    found = load("transformers").values(load("training").fill)
    recorded = np.load(HERE / "transformers.npz")
    assert set(found) == set(recorded)
    for name, values in found.items():
        if name.endswith("names"):
            assert list(values) == list(recorded[name]), name
        else:
            assert_allclose(values, recorded[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_attention_starts_as_in_pytorch(load):
    nn = load("initial", "from torch import nn").nn
    attention = nn.MultiheadAttention(64, 2)
    bound = (6 / (64 + 3 * 64)) ** 0.5  # Glorot and Bengio 2010
    assert 0.95 * bound < float(attention.in_proj_weight.abs().max()) <= bound
    assert not attention.in_proj_bias.numpy().any()
    assert not attention.out_proj.bias.numpy().any()


@pytest.mark.parametrize("name", ["nanogpt", "noise", "encoder", "transformer_lm", "dropping"])
def test_both_modes_give_the_same_bits(name, load):
    training, file = load("training"), load(f"models/{name}")
    weights = []
    for mode in ("eager", "graph"):
        flow.manual_seed(0)
        task = TorchTask(training.fill(file.Model()), getattr(file, "LOSS", None))
        data = [{"x": x, "y": y} for x, y in training.batches(file.DATA)]
        trainer_of(mode, task, data, flow.optim.SGD(task.parameters(), lr=0.1)).train(0, 3)
        weights.append(flat_weights(task))
    assert np.array_equal(*weights)


def test_a_saved_config_names_its_torch_files(load, tmp_path):
    file = load("net", "import torch\nclass Net(torch.nn.Linear):\n    AdamW = torch.optim.AdamW")
    module = LazyCall(file.Net)(in_features=1, out_features=1)
    config = OmegaConf.create({"model": LazyCall(TorchTask)(module=module)})
    LazyConfig.save(config, tmp_path / "config.yaml")
    del sys.modules["net"]
    model = instantiate(LazyConfig.load(tmp_path / "config.yaml").model)
    assert model.module.AdamW(model.parameters()).param_groups[0]["weight_decay"] == 0.01
    assert "torch" not in sys.modules


def test_a_file_sees_functions_that_are_replaced_for_a_while(load):
    file = load("net", "import torch\nrelu = lambda x: torch.relu(x)")
    with replaced((flow, "relu", str)):
        assert file.relu(3) == "3"
    assert file.relu(flow.ones(1)) == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("\nimport torch.fft", "net.py:2: torch.fft: OneFlow 0.9.0 has no Fourier transforms."),
        (
            "from torch.nn import Fold2",
            "net.py:1: torch.nn.Fold2: OneFlow 0.9.0 has no counterpart",
        ),
        (
            "from torch.nn.functional import scaled_dot_product_attention as attention\n"
            "attention(*[__import__('torch').ones(2, 2)] * 4, is_causal=True)",
            "net.py:2: attention takes attn_mask or is_causal.",
        ),
        (
            "from torch import nn\nnn.MultiheadAttention(4, 2, add_bias_kv=True)",
            "net.py:2: MultiheadAttention has no .'add_bias_kv'.",
        ),
    ],
)
def test_a_missing_name_is_refused_with_its_line(text, message, load):
    with refused(message):
        load("net", text)
