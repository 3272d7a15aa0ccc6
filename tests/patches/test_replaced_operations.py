"""Operations are replaced in every module that refers to them, and OneFlow is unchanged
afterwards.
"""

import functools

import oneflow as flow
import pytest

from libai.patches.wrapping import replaced_operations


def test_functions_methods_and_operators_are_replaced():
    called = []

    def replace(operation, name):
        @functools.wraps(operation)
        def noted(*args, **kwargs):
            called.append(name)
            return operation(*args, **kwargs)

        return noted

    x = flow.ones(2, 2)
    with replaced_operations(replace):
        (flow.matmul(x, x) + x).reshape(4)
    assert called == ["matmul", "add", "reshape"]


def test_oneflow_is_as_before_afterwards():
    before = dict(vars(flow.Tensor)), dict(vars(flow._C)), flow.matmul
    with (
        pytest.raises(ZeroDivisionError),
        replaced_operations(lambda operation, name: lambda *args: None),
    ):
        assert flow.matmul is not before[2] and flow._C.matmul is flow.matmul
        1 / 0  # noqa: B018
    assert (dict(vars(flow.Tensor)), dict(vars(flow._C)), flow.matmul) == before
