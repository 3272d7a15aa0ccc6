"""How a run gets its mode: `graph.enabled=auto`, `graph.on_build_error`, and switching from a
hook.
"""

import json

import pytest
from contract_runs import make_config
from jobs import read_column
from refusals import refused
from toy import Classifier

from libai import checkpoint
from libai.config import LazyCall, validate
from libai.engine import Run, default_setup
from libai.engine.hooks import CallbackHook
from libai.utils.errors import GraphBuildError

pytestmark = pytest.mark.e2e


class Branching(Classifier):
    """A model that cannot be compiled, because it branches on a value."""

    def forward(self, x, y):
        if x.sum() > -1e9:
            return Classifier.forward(self, x, y)
        raise AssertionError("never")


def run(folder, *overrides, model=Classifier, before=None):
    config = make_config(folder, "eager", *overrides)
    config.model = LazyCall(model)()
    trainer = Run(default_setup(validate(config)))
    if before is not None:
        before(trainer)
    trainer.train()
    summary = json.loads((folder / "summary.json").read_text())
    state = checkpoint.load(checkpoint.resolve(folder / "checkpoints")).state
    return read_column(folder), summary, state


def test_auto_keeps_a_mode_and_the_curve_of_an_undisturbed_run(tmp_path):
    losses, summary, state = run(tmp_path / "auto", "graph.enabled=auto")
    assert summary["mode"] in ("eager", "graph") and summary["mode"] == state["mode"]
    assert "95 % interval" in summary["mode_reason"]
    enabled = str(summary["mode"] == "graph").lower()
    expected, _, _ = run(tmp_path / "plain", f"graph.enabled={enabled}")
    assert losses == expected


@pytest.mark.parametrize(
    "settings", ["graph.enabled=auto", "graph.enabled=true graph.on_build_error=eager"]
)
def test_a_model_that_cannot_be_compiled_continues_with_the_eager_curve(tmp_path, settings):
    losses, summary, state = run(tmp_path / "run", *settings.split(), model=Branching)
    assert losses == run(tmp_path / "plain", model=Branching)[0]
    assert summary["mode"] == state["mode"] == "eager"
    assert "could not be compiled" in summary["mode_reason"]


class GraphOnly(CallbackHook):
    modes = ("graph",)


def eager_only():
    """Return a hook that uses `after_backward`, and the list to which it appends."""
    seen = []
    return CallbackHook(
        after_backward=lambda trainer: seen.append(trainer.model.a.weight.grad is not None)
    ), seen


def test_auto_with_an_eager_only_hook_trains_eagerly_with_a_reason(tmp_path):
    """The documentation promises this. In an earlier version the run ended with an error."""
    hook, seen = eager_only()
    losses, summary, _ = run(
        tmp_path / "auto",
        "graph.enabled=auto",
        before=lambda trainer: trainer.trainer.register_hooks([hook]),
    )
    expected, _, _ = run(tmp_path / "plain")
    assert losses == expected
    assert summary["mode"] == "eager" and seen == [True] * len(losses)
    assert summary["mode_reason"].startswith(
        "graph.enabled=auto: CallbackHook uses after_backward, which graph mode cannot call"
    )


class EagerOnly(CallbackHook):
    modes = ("eager",)


def test_auto_with_hooks_that_exclude_each_other_is_refused(tmp_path):
    with refused("auto finds no mode: GraphOnly works in graph.*EagerOnly works in eager"):
        run(
            tmp_path / "auto",
            "graph.enabled=auto",
            before=lambda trainer: trainer.trainer.register_hooks([GraphOnly(), EagerOnly()]),
        )


def test_a_build_error_stops_the_run_by_default(tmp_path):
    with pytest.raises(GraphBuildError, match="if x.sum"):
        run(tmp_path / "run", "graph.enabled=true", model=Branching)


@pytest.mark.parametrize("first", ["eager", "graph"])
def test_a_hook_can_switch_the_mode_during_a_run(tmp_path, first):
    second = {"eager": "graph", "graph": "eager"}[first]

    def add_switch(run):
        switch = CallbackHook(
            after_step=lambda trainer: trainer.iter + 1 == 4 and run.switch_mode(second)
        )
        run.trainer.register_hooks([switch])

    enabled = f"graph.enabled={str(first == 'graph').lower()}"
    losses, summary, state = run(tmp_path / "run", enabled, before=add_switch)
    expected, _, _ = run(tmp_path / "plain", enabled)
    assert list(losses.values()) == pytest.approx(list(expected.values()), rel=1e-6)
    assert len(losses) == 8 and summary["mode"] == state["mode"] == second
    assert first == "graph" or summary["build_seconds"] > 0
