"""`check_parity` passes sound models, and names the module in which a planted fault begins."""

import json

import faults
import oneflow as flow
import pytest
import toy
from oneflow import nn
from refusals import refused
from toy import Classifier, optimizer_of

from libai.cli.commands import parity
from libai.engine import ParityReport, check_parity
from libai.patches.internals import is_tracing
from libai.utils.errors import UserError


def check(build_model, build_optimizer=None, *, batches=None, num_iters=3, **options):
    return check_parity(
        build_model,
        batches or toy.batches(4),
        build_optimizer or (lambda model: optimizer_of("sgd", model)),
        num_iters=num_iters,
        device="cpu",
        **options,
    )


def check_fault(name):
    case = faults.case_of(faults.FAULTS[name])
    return check(case.model, case.optimizer, batches=case.batches())


@pytest.mark.promise
def test_a_sound_model_trains_identically_in_both_modes():
    report = check(Classifier, lambda model: optimizer_of("adamw", model), batches=toy.batches(3))
    assert (report.ok, report.module) == (True, None), report
    assert report.losses["eager"] == report.losses["graph"]
    assert len({*report.weights_sha256.values()}) == 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name, stage",
    [
        ("the scale of the first batch", "forward"),
        ("an older view", "forward"),
        ("a buffer that counts twice in graphs", "forward"),
        ("a layer detached in graphs", "backward"),
        ("gradient of the mode, momentum", "backward"),
    ],
)
def test_the_module_in_which_a_fault_begins_is_named(name, stage):
    report = check_fault(name)
    assert (report.verdict, report.module, report.stage) == ("broken", "middle", stage), report
    assert "middle" in report.reason and report.losses["eager"] != []


@pytest.mark.e2e
def test_a_clock_is_not_reported_as_a_difference_of_the_modes():
    report = check_fault("a clock in the loss")
    assert not report.ok and "not reproducible" in report.reason


@pytest.mark.e2e
def test_code_of_the_model_itself_is_distinguished_from_its_modules():
    class Own(Classifier):
        def forward(self, x, y):
            hidden = flow.relu(self.a(x)) * (2.0 if is_tracing() else 1.0)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(Own)
    assert (report.module, report.stage) == ("Own", "forward")
    assert "input 0 of b differs" in report.reason


@pytest.mark.e2e
def test_a_module_that_only_one_mode_runs_is_found():
    class Skipping(Classifier):
        def __init__(self):
            super().__init__()
            self.middle = nn.ReLU()

        def forward(self, x, y):
            hidden = self.a(x)
            hidden = hidden if is_tracing() else self.middle(hidden)
            return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}

    report = check(Skipping)
    assert (report.verdict, report.module, report.first_broken) == ("broken", "Skipping", 1), report
    assert (
        "it continues with input 0 of b and should continue with input 0 of middle" in report.reason
    )


@pytest.mark.e2e
def test_a_graph_that_never_learns_is_found(monkeypatch):
    """The trainer normally removes gradients before it compiles.

    Here it leaves zeros, which count as gradients.
    """

    def leave_zeros(model):
        for parameter in model.parameters():
            parameter.grad = flow.zeros_like(parameter)

    monkeypatch.setattr("libai.engine.compiled.step.clear_gradients", leave_zeros)
    assert not check(Classifier).ok


# --------------------------------------------------------------------------- mistakes of the caller


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_iters": 1}, "num_iters=1 must be at least 2 .--iters"),
        ({"num_accumulation_steps": 0}, "num_accumulation_steps"),
        ({"batches": iter(())}, "returned no batch"),
    ],
)
def test_impossible_arguments_are_refused(options, text):
    with refused(text):
        check(Classifier, **options)


def test_a_builder_must_build():
    with refused(r"returned a int, not a oneflow\.nn\.Module"):
        check(lambda: 3)


def test_a_forward_that_raises_later_gives_a_verdict():
    class Stopping(Classifier):
        calls = iter(range(9))

        def forward(self, x, y):
            assert next(self.calls) < 2, "enough"
            return super().forward(x, y)

    report = check(Stopping)
    assert not report.ok and "raises in update 3 of an eager run: enough" in report.reason


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("libai.engine.rehearsal.check_parity.get_world_size", lambda: 2)
    with refused("in one process, but this job has 2"):
        check(Classifier)


# -------------------------------------------------------------------------------- numbers and words


def test_the_report_is_strict_json_and_readable():
    report = ParityReport(
        False, "because", 2, losses={"eager": [1.0, float("nan")], "graph": [1.0, 2.0]}
    )
    decoded = json.loads(
        report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert (decoded["ok"], decoded["losses"]["eager"][1]) == (False, "nan")
    assert "BROKEN: because" in str(report)


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
def test_the_tool_prints_json_and_returns_an_exit_code(tmp_path, worker, words, code, verdict):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "my_parts.py").write_text(PARTS)
    done = worker.libai("parity", "config.py", *words, "--iters=3", "--json", cwd=tmp_path)
    assert done.returncode == code, done
    assert not (tmp_path / "not").exists()
    if verdict is None:
        assert json.loads(done.stdout)["key"] == "model.jiter"
        assert "Traceback" not in done.stderr
        return
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    assert report["stage"] == (None if verdict == "same" else "build")


@pytest.mark.parametrize(
    "words, text",
    [
        (["--gradients", "--json"], "--gradients and --json cannot be combined"),
        (["--against", "torch", "--json"], "--against and --json cannot be combined"),
        (["--python", "python3"], "--python does nothing without --against torch"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words, text):
    with pytest.raises(UserError, match=text):
        parity.run(["mlp_digits", *words])
