"""Trees of tensors are walked in order, and everything else in them is unchanged."""

from collections import namedtuple

import oneflow as flow

from libai.utils.tensors import map_tensors, tensors_in

A, B, C = flow.zeros(1), flow.ones(2), flow.nn.Parameter(flow.zeros(3))
TREE = {"a": A, "rest": [B, {"none": None, "c": (C, "text")}], "number": 1.5}


def test_every_tensor_is_found_in_order():
    assert [id(tensor) for tensor in tensors_in(TREE)] == [id(A), id(B), id(C)]
    assert tensors_in(A) == [A] and tensors_in(None) == []


def test_only_tensors_are_changed_and_containers_are_new():
    changed = map_tensors(TREE, lambda tensor: tuple(tensor.shape))
    assert changed == {
        "a": (1,),
        "rest": [(2,), {"none": None, "c": ((3,), "text")}],
        "number": 1.5,
    }
    assert TREE["a"] is A


def test_a_named_tuple_stays_one():
    Pair = namedtuple("Pair", "first second")
    changed = map_tensors(Pair(A, [B]), lambda tensor: tensor.numel())
    assert changed == Pair(1, [2]) and type(changed) is Pair
