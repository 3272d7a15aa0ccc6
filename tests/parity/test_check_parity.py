"""`check_parity` passes sound models, and catches each planted fault with the module that holds it."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine import GraphTrainer, ParityReport, check_parity
from libai.engine.parity.report import Difference, array_difference, relative_difference
from libai.engine.parity.state import PythonState, scan
from libai.launch.installation import LIBAI
from libai.layers import Dropout
from libai.models import GPT, ViT
from libai.oneflow_fixes.internals import is_tracing
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
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


def gpt_batches():
    rng = np.random.RandomState(0)
    tokens = [rng.randint(0, 20, (2, 9)) for _ in range(2)]
    return [{"input_ids": t[:, :-1].copy(), "labels": t[:, 1:].copy()} for t in tokens]


def vit_batches():
    rng = np.random.RandomState(0)
    return [{"images": rng.randn(4, 1, 4, 4).astype(np.float32), "labels": rng.randint(0, 3, 4)} for _ in range(2)]


SOUND = {
    "toy": (toy.Classifier, lambda: toy.batches(3)),
    "gpt": (lambda: GPT(20, 8, hidden_size=8, num_layers=1, num_heads=2, dropout=0.1), gpt_batches),
    "vit": (
        lambda: ViT(4, 2, num_channels=1, num_classes=3, hidden_size=8, num_layers=1, num_heads=2, dropout=0.1),
        vit_batches,
    ),
}


@pytest.mark.parametrize("name", ["toy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "vit"))])
def test_sound_models_are_the_same_training(name):
    build_model, batches = SOUND[name]
    report = check(build_model, lambda model: toy.optimizer_of("adamw", model), batches=batches())
    assert (report.verdict, report.module, report.findings, report.notes) == ("same", None, (), ()), report
    assert report.noise == {"eager": 0.0, "graph": 0.0}
    assert {"loss", "gradients", "weights", "optimizer"} <= set(report.differences)
    assert report.differences["gradients"].relative < 1e-4
    assert report.losses["eager"][0] == pytest.approx(report.losses["graph"][0], rel=1e-6)


@pytest.mark.slow
def test_accumulation_clipping_a_schedule_and_batch_statistics_are_compared_too():
    class Normed(toy.Tagger):
        def __init__(self):
            toy.Tagger.__init__(self)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x, y):
            logits = self.b(self.norm(flow.relu(self.a(x))))
            return {"losses": {"tag": nn.functional.cross_entropy(logits, y, ignore_index=-100)}}

    report = check(
        Normed,
        batches=toy.batches(6, ignored=0.4),
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


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        shifted = x if self.last is None else x + 0.1 * self.last
        self.last = x.detach().mean()
        return shifted


class Jitter(nn.Module):
    def forward(self, x):
        return x * (1 + random.random())


class DetachedInGraphs(nn.Module):
    def forward(self, x):
        return x.detach() if is_tracing() else x


def test_a_data_dependent_branch_is_named_with_its_line():
    report = check(lambda: Net(Branch()))
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "build"), report
    assert "if x.sum() > 0:" in report.reason and Path(__file__).name in report.reason


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = [1.0]

    def forward(self, x):
        self.seen.append(self.seen[-1] * 0.5)
        return x * self.seen[-1]


class Clocked(nn.Module):
    def forward(self, x):
        return x * (1 + time.perf_counter() % 1.0)


class Toggling(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        out = self.norm(x)
        self.norm.train(not self.norm.training)
        return out


def counting():
    calls = 0

    def scale(x):
        nonlocal calls
        calls += 1
        return x * (1 + 0.1 * calls)

    return scale


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = counting()

    def forward(self, x):
        return self.scale(x)


_scale_of_module = counting()


class GlobalClosure(nn.Module):
    def forward(self, x):
        return _scale_of_module(x)


@pytest.mark.parametrize(
    "layer, text",
    [
        (Counter, "changes middle.count (Counter, "),
        (Cached, "changes the global SCALES of "),
        pytest.param(Remembering, "self.last = x.detach().mean()", marks=pytest.mark.slow),
        (Jitter, "changes the state of Python's random numbers"),
        pytest.param(Listing, "self.seen.append(self.seen[-1] * 0.5)", marks=pytest.mark.slow),
        (Clocked, "return x * (1 + time.perf_counter() % 1.0)"),
        pytest.param(Toggling, "changes middle.norm.training (BatchNorm1d)", marks=pytest.mark.slow),
        pytest.param(Closure, "changes the variable calls around ", marks=pytest.mark.slow),
        (GlobalClosure, "changes the variable calls around "),
    ],
)
def test_python_that_a_graph_runs_only_once_is_named(layer, text):
    SCALES.clear()
    report = check(lambda: Net(layer()), num_iters=2)
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "build"), report
    assert text in report.reason, report.reason
    assert [text in note and "graph" in note for note in report.notes].count(True) == 1, report.notes
    assert not any("samples of a batch" in note for note in report.notes), "other forwards, other losses: no coupling"
    assert (report.noise["eager"] == 0.0) == (layer is not Clocked)
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


@pytest.mark.slow
def test_a_counter_in_a_buffer_is_the_same_training_and_its_modules_are_watched():
    report = check(lambda: Net(CountingBuffer()), num_accumulation_steps=2, batches=toy.batches(6))
    assert (report.verdict, report.module, report.findings) == ("same", None, ()), report
    assert report.differences["buffers"] == Difference()
    (note,) = report.notes
    assert note.startswith("forward changes the buffer middle.count (CountingBuffer, ") and "self.count += 1" in note


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Frozen(nn.Module):
    """Batch normalization that stays as it is."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.slow
def test_what_couples_samples_hooks_and_batch_statistics_is_named():
    coupled = check(lambda: Net(Centre()), num_iters=2)
    assert coupled.verdict == "same" and len(coupled.notes) == 1, coupled
    assert coupled.notes[0].startswith("middle (Centre) mixes the samples of a batch (its mean loss changes by")

    def with_a_hook():
        model = Net(nn.Linear(16, 16))
        nn.utils.weight_norm(model.middle)
        return model

    hooked = check(with_a_hook, num_iters=2)
    assert hooked.verdict == "same" and "middle has forward hooks (WeightNorm)" in hooked.notes[0], hooked
    frozen = check(lambda: Net(Frozen()), num_iters=2)
    assert frozen.differences["buffers"] == Difference(), "a compiled step counts no batches for a frozen layer"
    assert any(note.startswith("middle.norm: batch normalization takes its stat") for note in frozen.notes), frozen


class WrongBuffer(CountingBuffer):
    def forward(self, x):
        self.count += 2 if is_tracing() else 1
        return x / (1 + self.count)


@pytest.mark.slow
def test_the_module_of_a_buffer_that_differs_is_named():
    report = check(lambda: Net(WrongBuffer()), num_iters=2)
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "forward"), report
    assert report.differences["buffers"].where == "middle.count"


_shared = None


class Shared(nn.Module):
    scale = None

    def forward(self, x):
        global _shared
        Shared.scale = _shared = x.mean()
        _ones_like_memo(4)
        return x


@functools.lru_cache
def _ones_like_memo(size):
    return flow.ones(size)


@pytest.mark.slow
def test_python_state_is_put_back_between_runs():
    state = PythonState(Shared())
    Shared()(flow.ones(2))
    assert "Shared.scale" in scan(Shared()) and _ones_like_memo.cache_info().currsize == 1
    state.restore()
    assert Shared.scale is None and _shared is None and _ones_like_memo.cache_info().currsize == 0


@pytest.mark.slow
def test_code_of_the_model_itself_is_told_from_its_modules():
    class Own(toy.Classifier):
        def forward(self, x, y):
            hidden = flow.relu(self.a(x)) * (2.0 if is_tracing() else 1.0)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(Own)
    assert (report.module, report.stage) == ("Own", "forward")
    assert "what it hands to b differs" in report.reason


@pytest.mark.slow
def test_a_module_that_only_one_mode_runs_is_found():
    class Skipping(Net):
        def forward(self, x, y):
            hidden = self.a(x)
            hidden = hidden if is_tracing() else self.middle(hidden)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(lambda: Skipping(nn.ReLU()))
    assert (report.verdict, report.module, report.first_broken) == ("broken", "Skipping", 1), report
    assert "a call of middle in eager mode and a call of b in graph mode" in report.reason


@pytest.mark.slow
def test_a_loss_that_one_mode_does_not_return_is_found():
    class Partial(toy.Classifier):
        def forward(self, x, y):
            hidden = self.a(x)
            losses = {"cls": nn.functional.cross_entropy(self.b(flow.relu(hidden)), y)}
            if not is_tracing():
                losses["penalty"] = hidden.pow(2).mean()
            return {"losses": losses}

    report = check(Partial)
    assert (report.verdict, report.module, report.first_broken) == ("broken", "Partial", 1), report
    assert "penalty" in str(report.differences["loss"])


@pytest.mark.slow
def test_numbers_that_no_seed_governs_are_noise_and_no_excuse():
    class Unseeded(nn.Module):
        def forward(self, x):
            return x * (1 + random.SystemRandom().random())

    report = check(lambda: Net(Unseeded()))
    assert not report.ok
    assert report.noise["eager"] > 1e-3
    assert any("not reproducible" in finding for finding in report.findings)


# ---------------------------------------------------------------------------------------- faults behind the forward


@pytest.mark.slow
def test_a_backward_that_differs_is_told_from_a_forward():
    report = check(lambda: Net(DetachedInGraphs()))
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", "backward"), report
    assert report.first_difference == 1 and report.first_broken == 2


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


class NetWithPenalty(Net):
    def forward(self, x, y):
        hidden = self.middle(flow.relu(self.a(x)))
        loss = nn.functional.cross_entropy(self.b(hidden), y)
        return {"losses": {"cls": loss, "penalty": self.middle.penalty}}


@pytest.mark.slow
def test_a_loss_that_is_computed_and_not_returned_is_found():
    report = check(lambda: Net(Penalised()))
    assert not report.ok and "middle.penalty is a scalar" in report.reason
    assert report.differences["loss"] == Difference()


@pytest.mark.slow
def test_the_same_loss_is_fine_once_it_is_returned():
    report = check(lambda: NetWithPenalty(Penalised()))
    assert report.verdict == "same", report


@pytest.mark.slow
def test_a_parameter_left_out_of_the_optimizer_is_named():
    def without_a_bias(model):
        return flow.optim.SGD([p for name, p in model.named_parameters() if name != "b.bias"], lr=0.1)

    report = check(toy.Classifier, without_a_bias)
    assert not report.ok and report.reason.startswith("b.bias: the losses give a gradient")


@pytest.mark.slow
def test_a_frozen_parameter_is_no_finding():
    def build_frozen():
        model = toy.Classifier()
        model.b.bias.requires_grad_(False)
        return model

    def trainable(model):
        return flow.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    assert check(build_frozen, trainable).verdict == "same"


@pytest.mark.slow
def test_stock_dropout_is_explained_and_seeded_dropout_is_not():
    stock = check(lambda: Net(nn.Dropout(0.5)))
    assert any(note.startswith("middle: OneFlow 0.9's own dropout ignores every seed") for note in stock.notes), stock
    seeded = check(lambda: Net(Dropout(0.5)))
    assert seeded.verdict == "same" and not seeded.notes, seeded


@pytest.mark.slow
def test_a_parameter_that_no_loss_reaches_is_noted():
    class Idle(toy.Classifier):
        def __init__(self):
            toy.Classifier.__init__(self)
            self.idle = nn.Linear(2, 2)

    report = check(Idle)
    assert report.ok and "no loss reaches idle.weight, idle.bias" in "\n".join(report.notes), report


def test_an_eager_crash_is_a_finding_with_the_users_line():
    class Crashing(nn.Module):
        def forward(self, x):
            return x.reshape(3, 5)  # the line that is wrong

    report = check(lambda: Net(Crashing()))
    assert (report.verdict, report.module) == ("broken", "middle"), report
    assert "return x.reshape(3, 5)" in report.reason


@pytest.mark.slow
def test_builders_that_draw_other_weights_get_the_same_bytes():
    def build_unseeded():
        flow.manual_seed(random.SystemRandom().randrange(2**31))
        return toy.Classifier()

    report = check(build_unseeded)
    assert report.verdict == "same" and "draws other initial weights" in report.notes[0], report


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


def test_differences_of_numbers_that_are_not_finite():
    assert relative_difference(float("nan"), float("nan")) == 0.0
    assert relative_difference(float("inf"), 1.0) == float("inf")
    nan = np.array([1.0, float("nan")])
    assert array_difference(nan, nan) == (0.0, 0.0)
    assert array_difference(nan, np.array([1.0, 2.0]))[0] == float("inf")


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


@pytest.mark.parametrize(
    "words, code, verdict",
    [([], 0, "same"), (["+model.jitter=true"], 1, "broken"), (["model.jiter=true"], 2, None)],
)
def test_the_tool_prints_json_and_tells_by_its_exit_code(tmp_path, words, code, verdict):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "my_parts.py").write_text(PARTS)
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*LIBAI, "parity", tmp_path / "config.py", *words, "--iters=3", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "not").exists()
    if verdict is None:
        assert "jiter" in done.stderr and "Traceback" not in done.stderr
        return
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    assert report["module"] == (None if verdict == "same" else "Model")
