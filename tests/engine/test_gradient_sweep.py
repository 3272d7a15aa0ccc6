"""Operations of every kind have right gradients, and the judge agrees in float64."""

from contextlib import nullcontext

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from oneflow.nn import functional as F

from libai.engine.rehearsal.gradient_judge import judge
from libai.patches.global_tensors import repair_assignments

_UNARY = """
abs acos asin asinh atan ceil cos cosh erf erfc exp expm1 floor lgamma log log1p log2 neg
reciprocal round rsqrt sigmoid sign sin sinh softplus sqrt square tan tanh
""".split()  # noqa: SIM905
_ACTIVATIONS = """
celu gelu hardsigmoid hardswish logsigmoid mish relu relu6 selu
sigmoid silu softplus softsign tanh
""".split()  # noqa: SIM905
_BINARY = """
add sub mul div maximum minimum atan2 pow fmod
""".split()  # noqa: SIM905
_REDUCTIONS = """
sum mean prod max min logsumexp
""".split()  # noqa: SIM905
_I = flow.tensor([[0, 2], [1, 3], [2, 0], [3, 1]])


def _of_one(owner, name, *args):
    center = 0.5 if owner is F else 0.0
    return lambda h, s: getattr(owner, name)(h - center, *args)


def _of_two(owner, name):
    return lambda h, s: getattr(owner, name)(h, s)


#: name → function of `h` and `s`, both (4, 4, 4) and between 0.1 and 0.9
OPERATIONS = {
    **{f"unary {name}": _of_one(flow, name) for name in _UNARY},
    **{f"activation {name}": _of_one(F, name) for name in _ACTIVATIONS},
    **{f"binary {name}": _of_two(flow, name) for name in _BINARY},
    **{f"reduced {name}": _of_one(flow, name, 1) for name in _REDUCTIONS},
    "softmax": lambda h, s: F.softmax(h, 1),
    "log_softmax": lambda h, s: F.log_softmax(h, -1),
    "matmul": lambda h, s: flow.matmul(h, s),
    "einsum": lambda h, s: flow.einsum("bij,bkj->bik", h, s),
    "where": lambda h, s: flow.where(h > s, h, s * s),
    "clamp": lambda h, s: h.clamp(0.3, 0.6),
    "cat": lambda h, s: flow.cat([h, s], 1),
    "stack": lambda h, s: flow.stack([h, s], 1),
    "gather": lambda h, s: flow.gather(h[0], 1, _I),
    "scatter": lambda h, s: flow.scatter(h[0], 1, _I, s[0, :, :2]),
    "scatter_add": lambda h, s: flow.scatter_add(h[0], 1, _I, s[0, :, :2]),
    "index_select": lambda h, s: flow.index_select(h, 1, _I[0]),
    "masked_fill": lambda h, s: h.masked_fill(s > 0.5, 0.0),
    "diagonal": lambda h, s: flow.diagonal(h, 0, 1, 2),
    "triu": lambda h, s: flow.triu(h),
    "flip": lambda h, s: flow.flip(h, [1]),
    "roll": lambda h, s: flow.roll(h, 1, 1),
    "cumsum": lambda h, s: flow.cumsum(h, 1),
    "cumprod": lambda h, s: flow.cumprod(h, 1),
    "sort": lambda h, s: flow.sort(h, 1)[0],
    "topk": lambda h, s: flow.topk(h, 2, 1)[0],
    "norm": lambda h, s: flow.norm(h, dim=1),
    "layer_norm": lambda h, s: F.layer_norm(h, (4,), s[0, 0], s[0, 1]),
    "pad": lambda h, s: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    "conv1d": lambda h, s: F.conv1d(h, s, padding=1),
    "max_pool1d": lambda h, s: F.max_pool1d(h, 2),
    "avg_pool1d": lambda h, s: F.avg_pool1d(h, 2),
    "interpolate": lambda h, s: F.interpolate(h.unsqueeze(1), scale_factor=2, mode="bilinear"),
    "bce": lambda h, s: F.binary_cross_entropy(h, s.detach()),
    "kl_div": lambda h, s: F.kl_div(flow.log(h), s.detach(), reduction="mean"),
    "smooth_l1": lambda h, s: F.smooth_l1_loss(h, s, beta=1.0, reduction="mean"),
    "cross_entropy": lambda h, s: F.cross_entropy(h[0], _I[:, 0]),
    "clamp_": lambda h, s: (h * 1).clamp_(0.3, 0.6),
}


class One(nn.Module):
    """The mean of one operation's results, with different weights."""

    def __init__(self, operation):
        super().__init__()
        self.h, self.s = (nn.Parameter(flow.rand(4, 4, 4) * 0.8 + 0.1) for _ in range(2))
        self.operation = [operation]

    def forward(self, x):
        out = self.operation[0](self.h * 1, self.s * 1)
        out = out[0] if isinstance(out, (tuple, list)) else out
        weights = flow.tensor(np.cos(np.arange(out.nelement())).astype(np.float32))
        return {"losses": {"one": (out.reshape(-1) * weights).sum() + (self.s * x).sum() * 0.1}}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_right_gradient(name):
    repair_assignments()
    flow.manual_seed(0)
    judgement = judge(One(OPERATIONS[name]), lambda: {"x": flow.ones(1)}, nullcontext)
    assert not judgement.is_wrong, judgement.describe(name)
    assert judgement.obstacle is None, judgement.describe(name)
