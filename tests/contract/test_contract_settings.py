"""Settings of a run that take effect in both modes: evaluation, profiler, hooks of one rank,
preparation.
"""

import pstats

import contract_runs as cr
import pytest
from toy import flow, make_trainer

from libai.engine import loop
from libai.engine.hooks import CallbackHook

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("eval_iter, count", [("1", 2), ("null", 5)])
def test_eval_iter_limits_the_batches_of_each_dataset(tmp_path, mode, eval_iter, count):
    run = cr.make_run(
        tmp_path, mode, f"train.evaluation.eval_iter={eval_iter}", "train.train_iter=1"
    )
    seen = []
    evaluator = run.evaluators["top"]
    original = evaluator.process
    evaluator.process = lambda batch, outputs: seen.append(1) or original(batch, outputs)
    run.train()
    # val has 19 samples in batches of 8, other 13; one batch of each is tried before training
    assert len(seen) == count + 2


def test_the_profiler_writes_its_window(tmp_path, mode):
    cr.train(tmp_path, mode, "train.train_iter=6", "train.profile=[2,5]")
    profile = pstats.Stats(str(tmp_path / "profile" / "profile_rank0.prof"))
    steps = [calls for (_, _, name), (calls, *_) in profile.stats.items() if name == "run_step"]
    assert set(steps) == {3}
    assert "function calls" in (tmp_path / "profile" / "profile_rank0.txt").read_text()


def test_a_hook_for_the_main_rank_is_left_out_on_the_others(mode, monkeypatch):
    trainer = make_trainer(mode)
    mine, everywhere = [], []
    on_main = CallbackHook(after_step=lambda t: mine.append(t.iter))
    on_main.only_on = "main"
    monkeypatch.setattr(loop, "get_world_size", lambda: 2)
    monkeypatch.setattr(loop, "is_main_process", lambda: False)
    trainer.register_hooks([on_main, CallbackHook(after_step=lambda t: everywhere.append(t.iter))])
    trainer.train(0, 2)
    assert (mine, everywhere) == ([], [0, 1])


def test_preparation_is_done_once_and_a_graph_compiles_once(tmp_path, mode, monkeypatch):
    """A longer run calls `forward` more often in eager mode but not in graph mode."""
    calls = []
    relu = flow.relu
    monkeypatch.setattr(flow, "relu", lambda x: calls.append(1) or relu(x))
    counts = []
    for iterations in (4, 8):
        calls.clear()
        cr.train(
            tmp_path / str(iterations),
            mode,
            f"train.train_iter={iterations}",
            "train.evaluation.enabled=false",
        )
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts[1] - counts[0] == (4 if mode == "eager" else 0)
