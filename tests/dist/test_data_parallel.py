"""Averaging gradients over ranks.

Most checks need no second rank; the rest run in one job of two ranks.
"""

from pathlib import Path

import jobs
import oneflow as flow
import pytest
from oneflow import nn

from libai.forward.contract import read_losses
from libai.parallel.data_parallel import FlatReduction, OneFlowDDP, build_reduction
from libai.utils.errors import UserError

SCRIPT = Path(__file__).with_name("reduce_on_two_ranks.py")

pytestmark = pytest.mark.dist


def test_auto_is_flat_on_cpu_and_ddp_can_be_chosen():
    model = nn.Linear(2, 2)
    kinds = {
        kind: type(build_reduction(kind, model, [], read_losses, "cpu"))
        for kind in ("auto", "flat", "ddp")
    }
    assert kinds == {"auto": FlatReduction, "flat": FlatReduction, "ddp": OneFlowDDP}


def test_dtypes_that_cannot_be_added_up_are_refused():
    model = nn.Linear(2, 2).to(flow.float16)
    with pytest.raises(
        UserError, match="on CPU needs float32 or float64 .*'weight': 'oneflow.float16'.* float32"
    ):
        build_reduction("flat", model, [], read_losses, "cpu")
    with pytest.raises(
        UserError, match="gradient_reduction=ddp needs float32 .*float64.*gradient_reduction=flat"
    ):
        build_reduction("ddp", nn.Linear(2, 2).to(flow.float64), [], read_losses, "cpu")


@pytest.mark.launch
def test_two_ranks_agree_on_odd_models(tmp_path):
    finished = jobs.run_ranks(SCRIPT, 2, cwd=tmp_path, timeout=150)
    assert finished.stdout.count("all checks passed") == 2, finished
