"""The hand-written loops train like the trainers for any config, or refuse it."""

import numpy as np
import pytest
from contract_runs import make_config
from test_contract_optimizers import several
from toy import record_losses

from libai.benchmark.protocol import Unavailable
from libai.benchmark.worker import RawVariant
from libai.config import validate
from libai.engine import Run, default_setup

COMMON = ("lr_scheduler=null", "train.evaluation.enabled=false", "train.checkpointer.enabled=false")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, optim, refused",
    [
        (("train.clip_grad.value=0.01",), None, {"eager": "by value", "graph": "by value"}),
        (("train.clip_grad={max_norm: 0.01}",), None, {"graph": "by its own norm"}),
        (("train.freeze=['^a']", "train.num_accumulation_steps=2"), None, {}),
        (
            ("train.ema={enabled: true}",),
            None,
            {"eager": "average of the weights", "graph": "average of the weights"},
        ),
        ((), several(), {}),
    ],
    ids=["value", "norm", "frozen", "average", "several"],
)
def test_a_hand_written_loop_trains_alike_or_is_refused(mode, overrides, optim, refused, tmp_path):
    config = make_config(tmp_path, mode, *COMMON, *overrides)
    if optim is not None:
        config.optim = optim
    config = default_setup(validate(config))
    if mode in refused:
        with pytest.raises(Unavailable, match=refused[mode]):
            RawVariant(config, f"raw-{mode}")
        return
    found = RawVariant(config, f"raw-{mode}").iterate(5, losses=True)
    run = Run(config)
    losses = record_losses(run.trainer)
    run.train()
    np.testing.assert_allclose(found, losses[:5], rtol=1e-5)
