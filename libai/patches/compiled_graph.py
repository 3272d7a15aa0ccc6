"""An `nn.Graph` that can be changed between completion and plan, and is called faster; what it needs of `nn.Graph` is
private to OneFlow 0.9.0.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple

from libai.patches.launch_race import close_launch_race
from libai.utils.rank_notes import without_harmless_lines
from libai.utils.tensors import map_tensors, tensors_in


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect dead objects now and not until the end."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CompiledGraph(nn.Graph):
    """An `nn.Graph` whose compilation no other graph's end can disturb.

    OneFlow 0.9 keeps the variables of the graph that is being built in one global table, and the destructor of *any*
    graph empties it. A collection of garbage in the middle of a build then ends in "must be a variable created in
    nn.Graph", or worse.
    """

    def __init__(self) -> None:
        close_launch_race()
        with without_harmless_lines():
            super().__init__()

    def build_graph(self, *args: Any, **kwargs: Any) -> Any:
        with garbage_kept():
            return super().build_graph(*args, **kwargs)

    def _Graph__print(self, *_: Any) -> None:
        """Print nothing: what OneFlow prints of a failure it also raises."""

    def _Graph__rebuild_outputs(self, out2name: Any = None) -> None:
        """OneFlow has completed the job, and plans it next."""
        self.edit_job(out2name)
        super()._Graph__rebuild_outputs(out2name)

    def edit_job(self, out2name: Any) -> None:
        """Change the completed job, `self._full_job_proto`; `out2name`: tensor → name of each output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call as `nn.Graph.__call__` does; once compiled, without its walks over trees of arguments."""
        if self._can_skip_trees and not args:
            return self._call_compiled(kwargs)
        outputs = super().__call__(*args, **kwargs)
        if not args:
            # nn.Graph decides in which order tensors go in; go its way only as long as ours is the same
            expected = self._Graph__flatten_io("input", **kwargs)
            is_same_order = [id(tensor) for tensor in tensors_in(kwargs)] == [id(tensor) for tensor in expected]
            self._can_skip_trees = is_same_order and _is_plain(outputs)
        return outputs

    #: true once a call with keywords has shown that `_call_compiled` passes what nn.Graph would
    _can_skip_trees = False
    _cur_index_of_ouputs_buffer: int

    def _call_compiled(self, inputs: dict[str, Any]) -> Any:
        """Do what `nn.Graph.__run` of OneFlow 0.9.0 does. Shapes and dtypes are checked by the launch itself."""
        flat = tensors_in(inputs)
        for tensor in flat:
            if not tensor.is_contiguous():
                tensor.contiguous_()
        index = self._cur_index_of_ouputs_buffer
        outputs = self._outputs_tensor_tuple_buffer[index]
        native = flow._oneflow_internal.nn.graph
        native.RunLazyNNGraph(convert_to_tensor_tuple(flat), outputs, self._state_tensor_tuple, self._c_nn_graph)
        # past nn.Graph.__setattr__, which looks for modules in what it is given
        self.__dict__["_cur_index_of_ouputs_buffer"] = (index + 1) % self._outputs_buffer_size
        # the buffer is written again later, so that what leaves here is a copy
        copied = map_tensors(self._eager_outputs_buffer[index], lambda tensor: tensor.to(copy=True))
        native.SoftSyncNNGraphBuffers(outputs, self._c_nn_graph)
        return copied[0]


def _is_plain(value: Any) -> bool:
    """Return whether `value` is tensors and None in plain dicts, lists and tuples, which `map_tensors` can copy."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, flow.Tensor)
