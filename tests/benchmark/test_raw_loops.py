"""The hand-written loops train as the trainers do, whatever the config asks for, or refuse it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))
import contract_runs

from libai.benchmark.cases import MODES
from libai.benchmark.protocol import Unavailable
from libai.benchmark.variants import RawVariant
from libai.config import LazyCall, validate
from libai.engine import Run, default_setup
from libai.engine.hooks import CallbackHook
from libai.optim import get_param_groups

COMMON = ("lr_scheduler=null", "train.evaluation.enabled=false", "train.checkpointer.enabled=false")


def several():
    return {
        "body": LazyCall(flow.optim.AdamW)(params=LazyCall(get_param_groups)(only=r"^a\."), lr=0.01),
        "head": LazyCall(flow.optim.SGD)(lr=0.1, momentum=0.9),
    }


def config_of(folder, mode, *overrides, optim=None):
    config = contract_runs.make_config(folder, mode, *COMMON, *overrides)
    if optim is not None:
        config.optim = optim
    return default_setup(validate(config))


@pytest.mark.slow
@pytest.mark.parametrize("overrides, optim", [
    (("train.clip_grad.value=0.01",), None),
    (("train.clip_grad={max_norm: 0.01}",), None),
    (("train.freeze=['^a']", "train.ema={enabled: true, decay: 0.9}"), None),
    ((), several()),
], ids=["value", "norm", "frozen-ema", "several"])  # fmt: skip
def test_a_hand_written_loop_trains_alike_or_is_refused(mode, overrides, optim, tmp_path):
    config = config_of(tmp_path, mode, *overrides, optim=optim)
    if mode == "graph" and "clip_grad" in str(overrides):
        with pytest.raises(Unavailable, match="clip"):
            RawVariant(config, MODES["raw-graph"])
        return
    raw = RawVariant(config, MODES[f"raw-{mode}"])
    found = raw.iterate(5, losses=True)
    run, losses = Run(config), []
    run.trainer.register_hooks([CallbackHook(after_step=lambda t: losses.append(t.fetch_metrics()["train/loss"]))])
    run.train()
    np.testing.assert_allclose(found, losses[:5], rtol=1e-5)
    assert (raw._average is not None) == config.train.ema.enabled
