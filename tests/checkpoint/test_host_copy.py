"""The copy behind a background save: exact for every dtype and layout, one wait for all tensors, memory used again."""

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint import background
from libai.checkpoint.background import HostCopy
from libai.checkpoint.safetensors_format import raw_bytes, to_raw
from libai.checkpoint.shards import cut_shards

flow = pytest.importorskip("oneflow")


def shards_of(tensors):
    return cut_shards({"model": tensors}, 10**9)


def take(host, tensors):
    return dict(zip(sorted(tensors), host.take(shards_of(tensors))))


def all_kinds():
    numbers = flow.tensor(np.arange(12.0).reshape(3, 4))
    dtypes = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
    return {
        **{dtype: numbers.to(getattr(flow, dtype)) for dtype in dtypes},
        "parameter": flow.nn.Parameter(numbers.to(flow.float32)),
        "scalar": flow.tensor(3.5),
        "empty": flow.zeros(0, 3),
        "transposed": numbers.t(),
        "column": numbers[:, 1],
        "global": numbers.to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0)),
        "array": np.arange(6.0).reshape(2, 3).T,
        "swapped bytes": np.arange(3, dtype=">f4"),
    }


def test_every_kind_of_tensor_is_copied_as_a_save_on_the_spot_writes_it(tmp_path):
    tensors = all_kinds()
    path = checkpoint.save(tmp_path, 1, {"model": tensors}, {})
    copies = take(HostCopy(), tensors)
    loaded = checkpoint.load(path).tensors["model"]
    for name in tensors:
        dtype = loaded.spec(name).dtype
        assert copies[name].shape == loaded[name].shape, name
        assert raw_bytes(to_raw(copies[name], dtype)) == raw_bytes(to_raw(loaded[name], dtype)), name


def test_the_copies_do_not_follow_the_tensors():
    tensors = {name: tensor for name, tensor in all_kinds().items() if name not in ("bool", "empty")}
    copies = take(HostCopy(), tensors)
    before = {name: copy.copy() for name, copy in copies.items()}
    with flow.no_grad():
        for name, tensor in tensors.items():
            if name not in ("column", "transposed", "bfloat16", "float16"):  # no kernel, or a view of another
                tensor += 1
    flow._oneflow_internal.eager.Sync()
    assert all(np.array_equal(copies[name], before[name]) for name in tensors)
    assert tensors["float32"].numpy()[0, 0] == 1, "the control: the tensor itself has changed"


def test_there_is_one_wait_for_all_tensors(monkeypatch):
    waits, wait = [], background._wait
    monkeypatch.setattr(background, "_wait", lambda: (waits.append(1), wait()))
    shards = shards_of({str(i): flow.ones(100) * i for i in range(50)})

    def numpy(tensor):
        raise AssertionError("asking a tensor for its array waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(flow.Tensor, "numpy", numpy)
        copies = HostCopy().take(shards)
        with pytest.raises(AssertionError, match="waits for the device"):  # the control: a plain fetch does
            next(iter(shards[0].entries.values())).fetch()
    assert len(waits) == 1
    assert sorted(copy[0] for copy in copies) == list(range(50))


def test_the_memory_is_used_again():
    host, tensor = HostCopy(), flow.zeros(1000)
    first = take(host, {"a": tensor, "b": np.zeros(7, np.int8), "c": np.zeros(3)})
    addresses = [array.ctypes.data for array in first.values()]
    tensor += 1
    second = take(host, {"a": tensor, "b": np.ones(7, np.int8), "c": np.ones(3)})
    assert [array.ctypes.data for array in second.values()] == addresses
    assert all((array == 1).all() for array in second.values())
    assert all(address % 64 == 0 for address in np.diff(addresses))


def test_other_shapes_or_dtypes_get_memory_of_their_own():
    host = HostCopy()
    for array in (np.zeros(3), np.zeros(4), np.ones(4, np.float32), np.ones((2, 2), np.float32)):
        copy = take(host, {"a": array})["a"]
        assert copy.shape == array.shape and copy.dtype == array.dtype and (copy == array).all()
    assert host.take([]) == []
