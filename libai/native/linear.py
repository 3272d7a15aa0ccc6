"""Make `nn.Linear` and `functional.linear` of OneFlow 0.9.0 one operation on CPU (src/linear.cpp).

OneFlow's Python code calls a matmul and an addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import oneflow as flow


#: operations of `oneflow._C`. `replaced_operations` finds them here, but not in a closure
_matmul: Any = None
_matmul_with_bias: Any = None


def use_operation() -> None:
    """Replace both, for the whole process. Other inputs get the operations that they got before."""
    import oneflow as flow
    from oneflow.nn.modules import linear as modules

    global _matmul, _matmul_with_bias
    _matmul = flow._C.matmul
    _matmul_with_bias = flow._C.fused_matmul_bias
    modules.linear = linear
    flow.nn.functional.linear = linear
    flow.nn.Linear.forward = _forward


# positional arguments, because small layers spend their time in calls


def linear(input: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None = None) -> Any:
    """Return `input @ weight.T + bias`, with shapes `(…, in)`, `(out, in)` and `(out,)`."""
    if bias is None:
        return _matmul(input, weight, False, True)
    return _matmul_with_bias(input, weight, bias)


def _forward(module: Any, x: flow.Tensor) -> flow.Tensor:
    return linear(x, module.weight, module.bias)
