"""Make `nn.Linear` and `functional.linear` of OneFlow 0.9.0 one operation on CPU (src/linear.cpp).

OneFlow's Python code calls a matmul and an addition.
"""

from __future__ import annotations

from typing import Any


def use_operation() -> None:
    """Replace both, for the whole process. Other inputs get the operations that they got before."""
    import oneflow as flow
    from oneflow.nn.modules import linear as modules

    # local names and positional arguments, because small layers spend their time in calls
    matmul = flow._C.matmul
    operation = flow._C.fused_matmul_bias

    def linear(input: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None = None) -> Any:
        if bias is None:
            return matmul(input, weight, False, True)
        return operation(input, weight, bias)

    def forward(self: Any, x: flow.Tensor) -> flow.Tensor:
        return linear(x, self.weight, self.bias)

    modules.linear = linear
    flow.nn.functional.linear = linear
    flow.nn.Linear.forward = forward
