"""Cells with dropout: two ranks together have the masks of one process, however they share the
samples.
"""

from __future__ import annotations

import numpy as np
import oneflow as flow
from cells import on_ranks
from test_dropout import KEY, Forward, make_drops, numbers, run_eagerly

from libai.layers.random import random_context
from libai.utils.distributed import get_rank


def _global(array: np.ndarray, sbp: flow.sbp.sbp) -> flow.Tensor:
    return flow.tensor(array).to_global(flow.placement("cpu", [0, 1]), sbp)


def _eagerly(data_rank: int) -> np.ndarray:
    """Return what both ranks compute, each on its half of the samples as local tensors."""
    half = flow.tensor(np.split(numbers(), 2)[get_rank()])
    found = flow.tensor(run_eagerly(make_drops(), half, data_rank=data_rank))
    return found.to_global(flow.placement("cpu", [0, 1]), flow.sbp.split(0)).numpy()


@on_ranks(2)
def samples_have_the_masks_of_one_process(_: str) -> None:
    expected = run_eagerly(make_drops(), flow.tensor(numbers()))
    assert (_eagerly(get_rank()) == expected).all()
    assert (
        _eagerly(0) != expected
    ).any()  # negative control: ranks that do not know which they are
    model = make_drops().to_global(flow.placement("cpu", [0, 1]), flow.sbp.broadcast)
    split = _global(numbers(), flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    key = _global(np.array([KEY]), flow.sbp.broadcast)
    assert (run_eagerly(model, split) == expected).all()
    assert (Forward(model)(split, key).numpy() == expected).all()


@on_ranks(2, ["1", "2"])
def a_sample_split_over_an_axis_has_the_mask_of_one_process(axis: str) -> None:
    """As tensor-parallel layers have it."""
    first = make_drops()[0]
    expected = run_eagerly(first, flow.tensor(numbers()))
    layer = make_drops().to_global(flow.placement("cpu", [0, 1]), flow.sbp.broadcast)[0]
    split = _global(numbers(), flow.sbp.broadcast).to_global(sbp=flow.sbp.split(int(axis)))
    with random_context(KEY):
        assert (layer(split).numpy() == expected).all()
    if axis == "2":
        key = _global(np.array([KEY]), flow.sbp.broadcast)
        assert (Forward(layer)(split, key).numpy() == expected).all()
