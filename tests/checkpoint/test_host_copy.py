"""The copy of a background save is exact for every dtype and layout, waits once for all tensors,
and reuses its memory.
"""

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint.background import HostCopy
from libai.checkpoint.shards import cut_shards

flow = pytest.importorskip("oneflow")


def take(host, tensors):
    _, entries = cut_shards({"model": tensors}, 10**9)
    host.reserve(entries)
    return dict(zip(sorted(tensors), host.take(entries)))


def all_kinds():
    numbers = flow.tensor(np.arange(12.0).reshape(3, 4))
    dtypes = (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int32",
        "int64",
        "bool",
    )
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
        assert copies[name].shape == loaded[name].shape, name
        assert copies[name].dtype == loaded[name].dtype, name
        assert copies[name].tobytes() == loaded[name].tobytes(), name
        if name != "bfloat16":  # which numpy lacks
            values = tensors[name]
            values = values if isinstance(values, np.ndarray) else values.numpy()
            assert np.array_equal(loaded[name], values), name
