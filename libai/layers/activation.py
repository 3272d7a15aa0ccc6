"""GELU that is fast on CPU, in both modes, and native on other devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers.cpu import is_on_cpu, may_use_functions
from libai.utils.errors import UserError

# With a = |x| and Phi the normal distribution, gelu(x) = max(x, 0) - a Phi(-a), and its slope is s(a) for negative and
# 1 - s(a) for positive x, s(a) = Phi(-a) - a phi(a). OneFlow's erf and exp cost 4 to 12 ns per element on CPU and a
# multiplication 0.1, so that 2 Phi(-a) is written as (1 + a tail(a))^-32 (the form of Abramowitz & Stegun 7.1.28) and
# s(a) / Phi(-a) as a polynomial. Coefficients, lowest power first, by weighted minimax fits on [0, 9]: with float32
# rounding, absolute errors of 3e-7 + 1 ulp in gelu and 9e-7 in the slope. In powers of a here, of -a in the code.
_TAIL: tuple[float, ...] = (
    0.02493356540799141,
    0.010258037596940994,
    0.0013908626278862357,
    -8.017494837986305e-05,
    1.98866756e-05,
)
_SLOPE: tuple[float, ...] = (
    *(1.0000008344650269, -0.7979375123977661, -0.6361090540885925, -0.11081056296825409),
    *(0.022172780707478523, -0.002574918093159795, 0.00012484265607781708),
)
_TAIL = tuple(-c if i % 2 == 0 else c for i, c in enumerate(_TAIL))  # times -a: the sign of each power
_SLOPE = tuple(-0.5 * c if i % 2 == 0 else 0.5 * c for i, c in enumerate(_SLOPE))  # -s(a) / (2 Phi(-a))
_FAR = 16.0  # here Phi(-a) is 0 in float32, and the powers do not overflow yet

_TANH_LINEAR, _TANH_CUBIC = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def gelu(x: flow.Tensor, approximate: str = "none") -> flow.Tensor:
    """Gaussian error linear unit, x Phi(x), element by element.

    `approximate` as in `oneflow.nn.GELU`: "none", or "tanh" (Hendrycks & Gimpel 2016). float32 on CPU: within 1e-6 of
    the exact value and slope, absolute, and several times faster than OneFlow; else OneFlow's own operation.
    """
    if approximate not in ("none", "tanh"):
        raise UserError(f'gelu(approximate="{approximate}"): there is no such formula. Choose "none" or "tanh".')
    if x.dtype != flow.float32 or not is_on_cpu(x):
        return flow._C.gelu_with_approximate(x, approximate)
    formula = _FORMULAS[approximate]
    if not (flow.is_grad_enabled() and x.requires_grad):
        return formula(x, with_slope=False)[0]
    if may_use_functions():
        return _EAGER[formula].apply(x)
    # this has the same value and the same gradient, and keeps only the slope
    with flow.no_grad():
        value, slope = formula(x, with_slope=True)
    return (x - x.detach()) * slope + value


def value_and_slope(x: flow.Tensor, approximate: str) -> tuple[flow.Tensor, flow.Tensor]:
    """`gelu(x)` and its derivative, element by element, of a float32 tensor on CPU; not differentiated further."""
    value, slope = _FORMULAS[approximate](x, with_slope=True)
    assert slope is not None
    return value, slope


class GELU(nn.Module):
    """`gelu` as a module, with the argument of `oneflow.nn.GELU`."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply `gelu` to each element of `x`."""
        return gelu(x, self.approximate)

    def extra_repr(self) -> str:
        """The argument, for `print(model)`."""
        return f"approximate={self.approximate!r}"


def _erf_gelu(x: flow.Tensor, with_slope: bool) -> tuple[flow.Tensor, flow.Tensor | None]:
    negated = flow.abs(x).mul_(-1.0)
    near = flow._C.clamp_min(negated, -_FAR)
    power = _polynomial(near, _TAIL).mul_(near)
    for _ in range(3):
        power = (power + 2.0).mul_(power)  # (1 + e)^2 - 1, which keeps the digits of a small e
    power.add_(1.0)
    for _ in range(2):
        power.mul_(power)
    slope = None
    if with_slope:
        right = _polynomial(near, _SLOPE).div_(power).add_(0.5)
        # the sign of x, and 0.5 beside 0: `sign` is slower. Where x is so small that it is not the sign, right is 0.
        slope = (x * 1e30).clamp(-1.0, 1.0).mul_(right).add_(0.5)
    # (x + |x|) / 2, and not relu: it would turn a NaN into 0. Subtracted, since a sum of equal shapes is a slow kernel.
    return negated.sub_(x).sub_(near.div_(power)).mul_(-0.5), slope


def _tanh_gelu(x: flow.Tensor, with_slope: bool) -> tuple[flow.Tensor, flow.Tensor | None]:
    """x sigmoid(z) with z = 2 sqrt(2 / pi) (x + 0.044715 x^3), which is (1 + tanh(z / 2)) / 2."""
    square = flow.square(x)
    gate = flow.sigmoid((square * (_TANH_LINEAR * _TANH_CUBIC)).add_(_TANH_LINEAR) * x)
    value = x * gate
    if not with_slope:
        return value, None
    gate_slope = (square * (3.0 * _TANH_LINEAR * _TANH_CUBIC)).add_(_TANH_LINEAR)
    return value, gate + (gate * -1.0).add_(1.0).mul_(value).mul_(gate_slope)


def _polynomial(x: flow.Tensor, coefficients: tuple[float, ...]) -> flow.Tensor:
    """Horner's rule, in place."""
    result = (x * coefficients[-1]).add_(coefficients[-2])
    for coefficient in coefficients[-3::-1]:
        result = result.mul_(x).add_(coefficient)
    return result


def _with_slope_kept(formula: Callable[..., Any]) -> type[flow.autograd.Function]:
    """An eager function that computes its slope in the forward pass: one tensor kept, one product backward."""

    class Pointwise(flow.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            value, slope = formula(x, with_slope=True)
            ctx.save_for_backward(slope)
            return value

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    return Pointwise


_FORMULAS = {"none": _erf_gelu, "tanh": _tanh_gelu}
_EAGER = {formula: _with_slope_kept(formula) for formula in _FORMULAS.values()}
