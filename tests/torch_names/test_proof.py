"""The proof against PyTorch passes for equal updates, and names a layer norm without its weight.

proof/ has the weights, the batches and the record that `runner.py` made in PyTorch 2.13.
"""

import shutil

import numpy as np
import pytest
from omegaconf import OmegaConf
from refusals import refused
from test_torch_files import HERE, load  # noqa: F401

from libai.config import LazyCall, LazyConfig, load_config
from libai.torch_names import TorchTask
from libai.torch_names.proof import compare_with_torch, judge, runner

FUNCTIONAL = runner.torch.nn.functional


@pytest.mark.parametrize("is_weight_ignored", [False, True])
def test_a_weight_that_has_no_effect_is_found(is_weight_ignored, load, tmp_path, monkeypatch):  # noqa: F811
    plain = FUNCTIONAL.layer_norm
    for name in ("dropout", "scaled_dot_product_attention"):  # `main` replaces them
        monkeypatch.setattr(FUNCTIONAL, name, getattr(FUNCTIONAL, name))
    if is_weight_ignored:
        monkeypatch.setattr(FUNCTIONAL, "layer_norm", lambda x, shape, *_: plain(x, shape))
    file = load("models/nanogpt")
    module = LazyCall(file.Model)(c=LazyCall(file.Config)(layers=1, width=8))
    config = OmegaConf.create({"model": LazyCall(TorchTask)(module=module)})
    LazyConfig.save(config, tmp_path / "config.yaml")
    shutil.copytree(HERE / "proof", tmp_path, dirs_exist_ok=True)
    runner.main(str(tmp_path), "oneflow")
    is_same, text = judge(np.load(tmp_path / "oneflow.npz"), np.load(tmp_path / "torch.npz"))
    assert is_same != is_weight_ignored, text
    ignored = "begins in   output 2 of module.transformer.h.0.ln1"
    assert (ignored if is_weight_ignored else "SAME in float64") in text


def test_another_model_is_refused():
    with refused("--against torch needs a PyTorch module"):
        compare_with_torch(load_config("mlp_digits", []), "python3", 2)
