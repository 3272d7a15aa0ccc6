"""How a run comes to its mode: `graph.enabled=auto`, `graph.on_build_error`, and switching from a hook."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy
from contract_runs import make_config

from libai import checkpoint
from libai.config import LazyCall, validate
from libai.engine import DefaultTrainer, build, default_setup
from libai.engine.build_errors import GraphBuildError
from libai.engine.hooks import CallbackHook


class Branching(toy.Classifier):
    """Cannot be compiled: it branches on a value."""

    def forward(self, x, y):
        if x.sum() > -1e9:
            return toy.Classifier.forward(self, x, y)
        raise AssertionError("never")


def run(folder, *overrides, model=toy.Classifier, before=None):
    config = make_config(folder, "eager", *overrides)
    config.model = LazyCall(model)()
    trainer = DefaultTrainer(default_setup(validate(config)))
    if before is not None:
        before(trainer)
    trainer.train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    state = checkpoint.load(checkpoint.resolve(folder / "checkpoints")).state
    return [line["train/loss"] for line in lines], summary, state


def test_auto_keeps_a_mode_and_the_curve_of_an_undisturbed_run(tmp_path):
    losses, summary, state = run(tmp_path / "auto", "graph.enabled=auto")
    assert summary["mode"] in ("eager", "graph") and summary["mode"] == state["mode"]
    assert "ms per update" in summary["mode_reason"] and "ms per update" in state["mode_facts"]["mode_reason"]
    enabled = str(summary["mode"] == "graph").lower()
    expected, _, _ = run(tmp_path / "plain", f"graph.enabled={enabled}")
    assert losses == expected


def test_both_timed_modes_get_the_same_measured_costs_of_the_blocks(tmp_path, monkeypatch):
    build_trainer, given = build.build_trainer, {}

    def record(run, mode, *arguments):
        *others, costs = arguments
        given[mode] = costs
        return build_trainer(run, mode, *others)

    monkeypatch.setattr(build, "build_trainer", record)
    monkeypatch.setattr(DefaultTrainer, "_block_costs", lambda self, micro_batch_size: [0.25, 0.5])
    run(tmp_path / "auto", "graph.enabled=auto")
    assert given == {"graph": [0.25, 0.5], "eager": [0.25, 0.5]}


def test_auto_with_a_model_that_cannot_be_compiled_trains_eagerly(tmp_path, caplog):
    losses, summary, state = run(tmp_path / "auto", "graph.enabled=auto", model=Branching)
    expected, _, _ = run(tmp_path / "plain", model=Branching)
    assert losses == expected
    assert summary["mode"] == state["mode"] == "eager"
    assert "could not be compiled" in summary["mode_reason"]


def test_a_build_error_stops_the_run_by_default(tmp_path):
    with pytest.raises(GraphBuildError, match="if x.sum"):
        run(tmp_path / "run", "graph.enabled=true", model=Branching)


def test_on_build_error_eager_goes_on_with_the_eager_curve(tmp_path):
    losses, summary, state = run(tmp_path / "run", "graph.enabled=true", "graph.on_build_error=eager", model=Branching)
    expected, _, _ = run(tmp_path / "plain", model=Branching)
    assert losses == expected
    assert (summary["mode"], state["mode"]) == ("eager", "eager")
    assert "could not be compiled" in state["mode_facts"]["mode_reason"]


def test_a_compiled_run_says_how_long_the_compilation_took(tmp_path):
    _, summary, state = run(tmp_path / "run", "graph.enabled=true")
    assert summary["build_seconds"] > 0 and state["mode_facts"]["build_seconds"] == summary["build_seconds"]


@pytest.mark.parametrize("first", ["eager", "graph"])
def test_a_hook_can_switch_the_mode_in_mid_run(tmp_path, first):
    second = {"eager": "graph", "graph": "eager"}[first]

    def add_switch(trainer):
        switch = CallbackHook(after_step=lambda t: t.iter + 1 == 4 and trainer.switch_mode(second))
        trainer.trainer.register_hooks([switch])

    enabled = f"graph.enabled={str(first == 'graph').lower()}"
    losses, summary, state = run(tmp_path / "run", enabled, before=add_switch)
    expected, _, _ = run(tmp_path / "plain", enabled)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert len(losses) == 8 and summary["mode"] == state["mode"] == second
