"""`find_culprit` names what makes the modes diverge: of fourteen planted faults, the right one each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine.graph import graphs, tracing
from libai.engine.parity.bisection.search import find_culprit
from libai.engine.parity.check import on_bench
from libai.native.kernels import loaded_library
from libai.oneflow_fixes.internals import is_tracing
from libai.oneflow_fixes.job import passes

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow


class Net(toy.Classifier):
    def __init__(self, middle):
        super().__init__()
        self.middle = middle

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(self.middle(flow.relu(self.a(x)))), y)}}


def culprit(build_model=toy.Classifier, optimizer="adamw", **options):
    return on_bench(
        find_culprit,
        build_model,
        toy.batches(4),
        lambda model: toy.optimizer_of(optimizer, model, lr=0.1 if optimizer == "sgd" else 0.01),
        **{"num_iters": 2, "max_grad_norm": 0.1, "device": "cpu", **options},
    )


def spoil_updates(job, **values):
    """Other options for every update of a completed job, a `JobEdit`."""
    for op in job.ops.values():
        if op.HasField("user_conf") and "learning_rate" in op.user_conf.input and "model" in op.user_conf.input:
            for name, value in values.items():
                op.user_conf.attr[name].at_float = value


def plant_in_pass(monkeypatch, name, **values):
    original = getattr(passes, name)

    def wrong(job, *rest):
        result = original(job, *rest)
        spoil_updates(job, **values)
        return result

    monkeypatch.setattr(passes, name, wrong)


def plant_in_option(monkeypatch, is_on, **values):
    """What the compiler makes of an option is wrong."""
    original = graphs.TrainGraph._step_values

    def wrong(graph, job):
        if is_on(graph.config.proto):
            spoil_updates(job, **values)
        return original(graph, job)

    monkeypatch.setattr(graphs.TrainGraph, "_step_values", wrong)


def switch_on(monkeypatch, choose):
    """`choose(graph)` sets options of every training graph, as a user may."""
    original = graphs.TrainGraph.__init__

    def init(graph, *args, **kwargs):
        original(graph, *args, **kwargs)
        choose(graph)

    monkeypatch.setattr(graphs.TrainGraph, "__init__", init)


def test_equal_curves_have_no_culprit():
    assert culprit().kind == "none"


# ------------------------------------------------------------------------------------------ passes


@pytest.mark.parametrize(
    "name",
    [
        "make_clip_norm_exact",
        pytest.param("remove_step_count", marks=SLOW),
        pytest.param("remove_idle_ops", marks=SLOW),
        pytest.param("fold_constants", marks=SLOW),
    ],
)
def test_a_wrong_pass_is_named(name, monkeypatch):
    plant_in_pass(monkeypatch, name, l2=0.5, beta1=0.5)
    found = culprit()
    assert (found.kind, found.names) == ("pass", (name,)), found
    assert f"pass {name} is at fault (libai/" in str(found) and "graph.enabled=false" in str(found)


# ------------------------------------------------------------------------------------------ options


class Loud(toy.Classifier):
    """A loss so large that a scale of 2^127 makes its gradients infinite."""

    def forward(self, x, y):
        return {"losses": {"cls": super().forward(x, y)["losses"]["cls"] * 100.0}}


@pytest.mark.slow
def test_a_loss_scale_that_skips_updates_is_named(monkeypatch):
    scaler = {"init_scale": 2.0**127, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    switch_on(monkeypatch, lambda graph: graph.set_grad_scaler(flow.amp.GradScaler(**scaler)))
    found = culprit(Loud, max_grad_norm=None)
    assert (found.kind, found.names) == ("option", ("config.dynamic_loss_scale_policy",)), found
    assert "Leave it out" in found.text and "initial_loss_scale: 1.7" in found.text


@SLOW
def test_the_wrong_one_of_three_options_is_named(monkeypatch):
    def choose(graph):
        graph.config.allow_fuse_add_to_output()
        graph.config.allow_fuse_cast_scale()
        graph.config.enable_straighten_algorithm()

    switch_on(monkeypatch, choose)
    plant_in_option(monkeypatch, lambda config: config.enable_fuse_cast_scale, l2=0.5)
    found = culprit()
    assert (found.kind, found.names) == ("option", ("config.enable_fuse_cast_scale",)), found


@SLOW
def test_accumulation_by_oneflow_is_named_where_it_is_wrong(monkeypatch):
    plant_in_option(monkeypatch, lambda config: config.num_gradient_accumulation_steps > 1, l2=0.5)
    found = culprit(num_accumulation_steps=2)
    assert (found.kind, found.names) == ("option", ("config.set_gradient_accumulation_steps",)), found


@SLOW
def test_a_pass_and_an_option_that_are_both_wrong_are_named_together(monkeypatch):
    switch_on(monkeypatch, lambda graph: graph.config.allow_fuse_add_to_output())
    plant_in_pass(monkeypatch, "remove_idle_ops", beta1=0.5)
    plant_in_option(monkeypatch, lambda config: config.enable_fuse_add_to_output, l2=0.5)
    found = culprit()
    assert found.kind == "pass and option", found
    assert found.names == ("remove_idle_ops", "config.enable_fuse_add_to_output"), found
    assert str(found).count("is at fault") == 2 and "all 2 together" in str(found)


# ------------------------------------------------------------------------------------------ modules


class Twice(nn.Module):
    def forward(self, x):
        return x * 2 if is_tracing() else x


class Detached(nn.Module):
    def forward(self, x):
        return x.detach() if is_tracing() else x


@pytest.mark.parametrize(
    ("layer", "steps"), [(Twice, 1), pytest.param(Detached, 1, marks=SLOW), pytest.param(Detached, 2, marks=SLOW)]
)
def test_a_wrong_operation_or_backward_is_named_by_its_module(layer, steps):
    found = culprit(lambda: Net(layer()), num_accumulation_steps=steps)
    assert (found.kind, found.names) == ("module", ("middle",)), found
    assert f"middle ({layer.__name__}, " in found.text


# ------------------------------------------------------------------------------------------ repairs


@SLOW
def test_missing_copies_of_weights_are_named(monkeypatch):
    options = {"num_accumulation_steps": 2, "max_grad_norm": None, "num_iters": 3}
    assert culprit(toy.LateReader, "sgd", **options).kind == "none"
    monkeypatch.setattr(passes, "join_updates", lambda job: 0)  # it would wait for the gradient of `v`
    monkeypatch.setattr(graphs.TrainGraph, "_needs_copies", False)
    found = culprit(toy.LateReader, "sgd", **options)
    assert (found.kind, found.names) == ("repair", ("read_copies_of_variables",)), found
    assert "is missing" in found.text and "decision 0007" in found.text


@SLOW
def test_a_wrong_repair_of_tracing_is_named(monkeypatch):
    class Stopped(nn.Module):
        def forward(self, x):
            return x + x.detach()

    wrong = [(o, n, (lambda self: self) if n == "detach" else v) for o, n, v in tracing._REPLACEMENTS]
    monkeypatch.setattr(tracing, "_REPLACEMENTS", wrong)
    found = culprit(lambda: Net(Stopped()), "sgd", max_grad_norm=None)
    assert (found.kind, found.names) == ("repair", ("tracing of data and detach",)), found


CONFIG = """
import numpy as np, oneflow as flow
from oneflow import nn
from libai.config import LazyCall, defaults
class Sharp(nn.Module):
    def forward(self, x):
        return x * 1.5 if flow._oneflow_internal.lazy_mode.is_enabled() else x
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.sharp = nn.Linear(8, 4), Sharp()
    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.sharp(self.a(x)), y)}}
def loader():
    rng = np.random.RandomState(0)
    return [{"x": rng.randn(8, 8).astype("float32"), "y": rng.randint(0, 4, 8)} for _ in range(8)]
model = LazyCall(Model)()
optim = LazyCall(flow.optim.SGD)(lr=0.1)
dataloader = {"train": LazyCall(loader)()}
train, graph = defaults("train"), defaults("graph")
train.train_iter, train.train_micro_batch_size = 8, 8
"""


def run_tool(*words):
    command = [sys.executable, str(ROOT / "tools" / "parity.py"), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


@SLOW
def test_the_open_race_of_launches_is_named_though_it_ends_the_process(tmp_path):
    """`planted_race.py` delays every entry of a job, so that each training ends its process or hangs."""
    words = ["--bisect", "--iters=30", "--json", f"--minify={tmp_path / 'case.py'}"]
    found = run_tool(Path(__file__).with_name("planted_race.py"), *words)
    assert (found["kind"], found["names"]) == ("repair", ["launch_race"]), found
    assert found["failure"].startswith("the process was ended")
    assert "launch_race is missing" in found["text"] and "decision 0006" in found["text"]
    assert "no program was written: launch_race repairs OneFlow itself" in found["case"]
    assert not (tmp_path / "case.py").exists()


@SLOW
def test_the_tool_changes_the_environment_as_well_and_writes_the_program(tmp_path, monkeypatch):
    (tmp_path / "config.py").write_text(CONFIG)
    monkeypatch.setenv("ONEFLOW_ENABLE_NHWC", "1")
    found = run_tool(tmp_path / "config.py", "--iters=3", "--json", f"--minify={tmp_path / 'case.py'}")
    assert (found["kind"], found["names"]) == ("module", ["sharp"]), found
    tried = [names for names, _ in found["tried"]]
    assert ["ONEFLOW_ENABLE_NHWC off"] in tried
    assert (["CPU kernels off"] in tried) == (loaded_library() is not None)
    assert "module sharp with OneFlow alone" in found["case"] and (tmp_path / "case.py").exists()
