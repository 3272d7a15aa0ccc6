"""A model as an ONNX file: kept where it computes what the model does, refused otherwise.

`oneflow_onnx` and `onnxruntime` are stand-ins here, which show what the export does with what they answer; the last
tests take the real ones, where they are installed (`pip install 'libai[onnx]'`).
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
import toy
from marks import slow_but

from libai.inference.onnx_export import VERSIONS, export_onnx
from libai.models import BERT, GPT, MLP, T5, ConvNeXt, Llama, ResNet, Swin, ViT
from libai.utils.errors import UserError

IMAGES = {"images": np.random.RandomState(0).randn(2, 3, 32, 32).astype(np.float32)}
IDS = {"input_ids": np.random.RandomState(0).randint(0, 100, (2, 16))}
WORDS = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}


class Small(toy.Classifier):
    """Without a loss."""

    def forward(self, x):
        return {"logits": self.b(flow.relu(self.a(x)))}


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins; `compute(feed)` is what onnxruntime gives, by default what the module of the last test computes."""
    said = SimpleNamespace(kinds={"matmul", "broadcast_matmul", "broadcast_add", "relu", "reshape"}, error=None)

    def translate(job, folder):
        if said.error:
            raise said.error
        said.weights = flow.load(folder)
        inputs = [op.name for op in job.net.op if op.WhichOneof("op_type") == "input_conf"]
        node = SimpleNamespace(input=[f"{inputs[0]}/out"], output=["last/out_0"])
        graph = SimpleNamespace(
            input=[SimpleNamespace(name=f"{name}/out") for name in inputs],
            output=[SimpleNamespace(name="last/out_0")],
            node=[node],
        )
        said.graph = graph
        proto = SimpleNamespace(graph=graph, SerializeToString=lambda: b"the file")
        return SimpleNamespace(MakeModel=lambda name, file: proto)

    class Session:
        def __init__(self, content, providers):
            assert content == b"the file"

        def get_inputs(self):
            return said.graph.input

        def run(self, outputs, feed):
            assert outputs == ["logits"]
            return [said.compute(**feed)]

    contents = {
        "oneflow_onnx": {},
        "oneflow_onnx.oneflow2onnx": {},
        "oneflow_onnx.oneflow2onnx.flow2onnx": {
            "ProcessFlowGraph": translate,
            "util": SimpleNamespace(FindOpset=lambda asked: 10),
        },
        "oneflow_onnx.oneflow2onnx.handler": {
            "flow_op": SimpleNamespace(CreateMapping=lambda opset, extra: said.kinds),
        },
        "onnx": {},
        "onnxruntime": {"InferenceSession": Session},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    return said


@pytest.fixture
def small(packages):
    model = Small()

    def compute(x):
        hidden = np.maximum(x @ model.a.weight.numpy().T + model.a.bias.numpy(), 0)
        return hidden @ model.b.weight.numpy().T + model.b.bias.numpy()

    packages.compute = compute
    return model


X = {"x": np.random.RandomState(0).randn(4, 8).astype(np.float32)}


def test_what_computes_the_same_is_kept(small, packages, tmp_path):
    small.register_buffer("unsaved", flow.ones(3), persistent=False)
    differences = export_onnx(small, X, tmp_path / "new" / "model.onnx")
    assert (tmp_path / "new" / "model.onnx").read_bytes() == b"the file"
    assert set(differences) == {"logits"} and 0 <= differences["logits"] < 1e-5
    assert "unsaved" in packages.weights and "a.weight" in packages.weights
    assert packages.graph.node[0].input == ["x"] and packages.graph.node[0].output == ["logits"]
    assert small.training


@pytest.mark.parametrize("what", ["values", "shape", "data"])
def test_what_computes_something_else_is_refused(small, packages, tmp_path, what):
    right = packages.compute
    kept = right(**X)
    wrong = {
        "values": lambda x: right(x) * 1.0001,
        "shape": lambda x: right(x)[:1],
        "data": lambda x: kept,  # the first batch's alone
    }
    packages.compute = wrong[what]
    with pytest.raises(UserError, match=r"output logits differs from the module's by .* 1e-05 is allowed. No file was"):
        export_onnx(small, X, tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


def test_errors_of_the_packages_are_one_clear_line(small, packages, tmp_path):
    packages.error = KeyError("blocks.0.attention.causal_mask")
    with pytest.raises(UserError, match=r"the exporter refuses it: .*causal_mask.* \(KeyError\). No file was written"):
        export_onnx(small, X, tmp_path / "model.onnx")

    def refuses(x):
        raise RuntimeError("ShapeInferenceError\nmore")

    packages.error, packages.compute = None, refuses
    with pytest.raises(UserError, match="onnxruntime refuses it: ShapeInferenceError"):
        export_onnx(small, X, tmp_path / "model.onnx")
    packages.kinds.clear()
    with pytest.raises(UserError, match=r"no translation of .*relu \(at model\).* Predict with `libai predict`"):
        export_onnx(small, X, tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


def test_missing_packages_are_named_with_versions(monkeypatch, tmp_path):
    for package in (*VERSIONS, "oneflow_onnx.oneflow2onnx.flow2onnx"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"not installed: oneflow_onnx .*pip install oneflow_onnx==0.6.2 onnx==1.14.1"):
        export_onnx(Small(), X, tmp_path / "model.onnx")


real = pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in VERSIONS),
    reason="oneflow_onnx, onnx and onnxruntime are not installed: pip install 'libai[onnx]'",
)
MODELS = {
    "MLP": (lambda: MLP(3 * 32 * 32, [32]), IMAGES),
    "ResNet": (lambda: ResNet(width=8), IMAGES),
    "ConvNeXt": (lambda: ConvNeXt(32, widths=(16, 32, 64, 96), blocks_per_stage=(1, 1, 2, 1)), IMAGES),
    "ViT": (lambda: ViT(32, 8, hidden_size=32, num_layers=2), IMAGES),
    "Swin": (lambda: Swin(32, hidden_size=16, blocks_per_stage=(1, 1), num_heads=(2, 4), window_size=4), IMAGES),
    "GPT": (lambda: GPT(100, 16, **WORDS), IDS),
    "Llama": (lambda: Llama(100, 16, **WORDS), IDS),
    "BERT": (lambda: BERT(100, 16, **WORDS), IDS),
}


@real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(MODELS, "MLP", "ViT"))
def test_models_of_the_library(name, tmp_path):
    build, batch = MODELS[name]
    assert max(export_onnx(build(), batch, tmp_path / "model.onnx").values()) < 1e-5
    assert (tmp_path / "model.onnx").stat().st_size > 1000


@real
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_operations_that_it_does_not_know(tmp_path):
    with pytest.raises(UserError, match="the exporter has no translation of .*nll"):
        export_onnx(T5(100, 16, **WORDS), {**IDS, "labels": IDS["input_ids"]}, tmp_path / "model.onnx")
