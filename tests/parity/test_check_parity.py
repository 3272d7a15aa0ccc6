"""`check_parity` passes sound models, and catches each planted fault with the module that holds it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import jobs
import oneflow as flow
import pytest
import toy
from oneflow import nn
from parity_variants import Normalized

from libai.engine import GraphTrainer, ParityReport, check_parity
from libai.engine.parity.report import Difference
from libai.launch.installation import LIBAI
from libai.oneflow_fixes.internals import is_tracing
from libai.utils.errors import UserError

SCALES: dict[str, flow.Tensor] = {}


class Net(toy.Classifier):
    """The toy classifier with a layer of the test's in the middle."""

    def __init__(self, middle: nn.Module):
        toy.Classifier.__init__(self)
        self.middle = middle

    def forward(self, x, y):
        hidden = self.middle(flow.relu(self.a(x)))
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}


def check(build_model, build_optimizer=None, *, batches=None, num_iters=3, **options) -> ParityReport:
    return check_parity(
        build_model,
        batches or toy.batches(4),
        build_optimizer or (lambda model: toy.optimizer_of("sgd", model)),
        num_iters=num_iters,
        device="cpu",
        **options,
    )


# ---------------------------------------------------------------------------------------- sound models


@pytest.mark.promise
def test_a_sound_model_is_the_same_training():
    report = check(toy.Classifier, lambda model: toy.optimizer_of("adamw", model), batches=toy.batches(3))
    assert (report.verdict, report.module, report.findings, report.notes) == ("same", None, (), ()), report
    assert report.noise == {"eager": 0.0, "graph": 0.0}
    assert {"loss", "gradients", "weights", "optimizer"} <= set(report.differences)
    assert report.differences["gradients"].relative < 1e-4
    assert report.losses["eager"][0] == pytest.approx(report.losses["graph"][0], rel=1e-6)


@pytest.mark.e2e
def test_accumulation_clipping_a_schedule_and_batch_statistics_are_compared_too():
    report = check(
        Normalized,
        batches=toy.batches(6),
        num_accumulation_steps=2,
        max_grad_norm=0.1,
        build_lr_scheduler=lambda optimizer: flow.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    )
    assert report.ok and not report.findings, report
    assert max(d.relative for d in report.differences.values()) < 1e-4
    assert "buffers" in report.differences


# ---------------------------------------------------------------------------------------- faults in the forward


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x * 2 if self.count > 2 else x


class Cached(nn.Module):
    def forward(self, x):
        if "scale" not in SCALES:
            SCALES["scale"] = x.detach().abs().mean()
        return x / SCALES["scale"]


class Jitter(nn.Module):
    def forward(self, x):
        return x * (1 + random.random())


class DetachedInGraphs(nn.Module):
    def forward(self, x):
        return x.detach() if is_tracing() else x


@pytest.mark.e2e
def test_a_data_dependent_branch_is_named_with_its_line():
    report = check(lambda: Net(Branch()))
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "build"), report
    assert "if x.sum() > 0:" in report.reason and Path(__file__).name in report.reason


class Clocked(nn.Module):
    def forward(self, x):
        return x * (1 + time.perf_counter() % 1.0)


@pytest.mark.promise
@pytest.mark.parametrize(
    "layer", [Counter, *(pytest.param(one, marks=pytest.mark.e2e) for one in (Cached, Jitter, Clocked))]
)
def test_python_that_a_graph_runs_only_once_is_named(layer):
    SCALES.clear()
    report = check(lambda: Net(layer()), num_iters=4)
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "forward"), report
    is_noisy = layer is Clocked
    assert (report.noise["eager"] > 0.0) == is_noisy
    assert any("not reproducible" in finding for finding in report.findings) == is_noisy
    assert not SCALES, "the variables of the user's module must be as they were"


class CountingBuffer(nn.Module):
    """The same counter where a graph can keep it; and a clock that only measures."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", flow.zeros(1))

    def forward(self, x):
        started = time.perf_counter()
        self.count += 1
        out = x / (1 + self.count)
        assert time.perf_counter() >= started
        return out


@pytest.mark.e2e
def test_a_counter_in_a_buffer_is_the_same_training_and_its_modules_are_watched():
    report = check(lambda: Net(CountingBuffer()), num_accumulation_steps=2, batches=toy.batches(6))
    assert (report.verdict, report.module, report.findings) == ("same", None, ()), report
    assert report.differences["buffers"] == Difference()
    (note,) = report.notes
    assert note.startswith("forward changes the buffer middle.count (CountingBuffer, ") and "self.count += 1" in note


@pytest.mark.e2e
def test_code_of_the_model_itself_is_told_from_its_modules():
    class Own(toy.Classifier):
        def forward(self, x, y):
            hidden = flow.relu(self.a(x)) * (2.0 if is_tracing() else 1.0)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(Own)
    assert (report.module, report.stage) == ("Own", "forward")
    assert "what it hands to b differs" in report.reason


@pytest.mark.e2e
def test_a_module_that_only_one_mode_runs_is_found():
    class Skipping(Net):
        def forward(self, x, y):
            hidden = self.a(x)
            hidden = hidden if is_tracing() else self.middle(hidden)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(lambda: Skipping(nn.ReLU()))
    assert (report.verdict, report.module, report.first_broken) == ("broken", "Skipping", 1), report
    assert "a call of middle in eager mode and a call of b in graph mode" in report.reason


# ---------------------------------------------------------------------------------------- faults behind the forward


@pytest.mark.e2e
def test_a_backward_that_differs_is_told_from_a_forward():
    report = check(lambda: Net(DetachedInGraphs()))
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "backward"), report
    assert report.first_difference == 1 and report.first_broken == 2


@pytest.mark.e2e
def test_a_graph_that_never_learns_is_found(monkeypatch):
    """The trainer removes gradients before it compiles; here it leaves zeros, which count as gradients."""

    def leave_zeros(trainer):
        for parameter in trainer.model.parameters():
            parameter.grad = flow.zeros_like(parameter)

    monkeypatch.setattr(GraphTrainer, "_clear_gradients", leave_zeros)
    report = check(toy.Classifier)
    assert not report.ok
    assert any("the graph never learns" in finding for finding in report.findings), report
    assert report.stage == "update" and "graph mode does not change" in report.reason


# ---------------------------------------------------------------------------------------- faults of both modes


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.dense(x)
        self.penalty = hidden.pow(2).mean()
        return hidden


@pytest.mark.e2e
def test_a_loss_that_is_computed_and_not_returned_is_found():
    report = check(lambda: Net(Penalised()))
    assert not report.ok and "middle.penalty is a scalar" in report.reason
    assert report.differences["loss"] == Difference()


@pytest.mark.e2e
def test_a_parameter_left_out_of_the_optimizer_is_named():
    def without_a_bias(model):
        return flow.optim.SGD([p for name, p in model.named_parameters() if name != "b.bias"], lr=0.1)

    report = check(toy.Classifier, without_a_bias)
    assert not report.ok and report.reason.startswith("b.bias: the losses give a gradient")


@pytest.mark.e2e
def test_an_eager_crash_is_a_finding_with_the_users_line():
    class Crashing(nn.Module):
        def forward(self, x):
            return x.reshape(3, 5)  # the line that is wrong

    report = check(lambda: Net(Crashing()))
    assert (report.verdict, report.module) == ("broken", "middle"), report
    assert "return x.reshape(3, 5)" in report.reason


# ---------------------------------------------------------------------------------------- mistakes of the caller


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_iters": 1}, "num_iters=1 is below 2"),
        ({"bound": 0.0}, "bound=0.0 is a relative difference"),
        ({"num_accumulation_steps": 0}, "num_accumulation_steps=0 is below 1"),
        ({"batches": iter(())}, "no batches"),
    ],
)
def test_impossible_arguments_are_refused(options, text):
    with pytest.raises(UserError, match=text):
        check(toy.Classifier, **options)


def test_a_builder_must_build():
    model = toy.Classifier()
    with pytest.raises(UserError, match="returned the same module object twice"):
        check(lambda: model)
    with pytest.raises(UserError, match=r"gave a int, not an oneflow\.nn\.Module"):
        check(lambda: 3)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("libai.engine.parity.check.get_world_size", lambda: 2)
    with pytest.raises(UserError, match="runs on one process, and this job has 2"):
        check(toy.Classifier)


# ---------------------------------------------------------------------------------------- numbers and words


def test_the_report_is_strict_json_and_a_table():
    report = ParityReport("broken", "because", 1e-5, 2, losses={"eager": [1.0, float("nan")], "graph": [1.0, 2.0]})
    decoded = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (decoded["ok"], decoded["losses"]["eager"][1]) == (False, "nan")
    assert "BROKEN: because" in str(report) and report.exit_code == 1
    assert ParityReport("within bound", "", 1e-5, 2).exit_code == 0


# ---------------------------------------------------------------------------------------- the tool

CONFIG = """
import oneflow as flow
from libai.config import LazyCall, defaults
from my_parts import Model, loader
model = LazyCall(Model)()
optim = LazyCall(flow.optim.SGD)(lr=0.1)
dataloader = dict(train=LazyCall(loader)())
train, graph = defaults("train"), defaults("graph")
train.output_dir = "not/written"
train.train_micro_batch_size = 8
train.train_iter = 5
"""
PARTS = """
import random
import numpy as np, oneflow as flow
class Model(flow.nn.Module):
    def __init__(self, jitter=False):
        super().__init__()
        self.jitter, self.dense = jitter, flow.nn.Linear(8, 4)
    def forward(self, x, y):
        print("a model may print")
        logits = self.dense(x * random.random() if self.jitter else x)
        return {"losses": {"cls": flow.nn.functional.cross_entropy(logits, y)}}
def loader():
    rng = np.random.RandomState(0)
    return [{"x": rng.randn(8, 8).astype("float32"), "y": rng.randint(0, 4, 8)} for _ in range(3)]
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "words, code, verdict",
    [([], 0, "same"), (["+model.jitter=true"], 1, "broken"), (["model.jiter=true"], 2, None)],
)
def test_the_tool_prints_json_and_tells_by_its_exit_code(tmp_path, words, code, verdict):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "my_parts.py").write_text(PARTS)
    done = jobs.run([*LIBAI, "parity", "config.py", *words, "--iters=3", "--json"], cwd=tmp_path, timeout=120)
    assert done.returncode == code, done
    assert not (tmp_path / "not").exists()
    if verdict is None:
        assert "jiter" in done.stderr and "Traceback" not in done.stderr
        return
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    assert report["module"] == (None if verdict == "same" else "Model")
