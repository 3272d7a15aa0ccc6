"""An `nn.Graph` with a job that can be edited before planning, and with faster calls.

It uses private parts of `nn.Graph` in OneFlow 0.9.0.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple
from oneflow.nn.graph import proxy
from oneflow.nn.modules.batchnorm import _BatchNorm

from libai.native.kernels import replace_functions
from libai.native.symbol_table import Unavailable, open_oneflow
from libai.patches.internals import release_memory
from libai.patches.launch_race import close_launch_race
from libai.patches.local_operations import hooks_of_parameter
from libai.patches.table import is_on
from libai.patches.wrapping import repair, repaired
from libai.utils.errors import GraphBuildError
from libai.utils.rank_notes import without_harmless_lines
from libai.utils.tensors import map_tensors, tensors_in

#: implemented in C instead of Python, because this runs in every step
_copy = operator.methodcaller("to", copy=True)


#: `oneflow::Singleton<OpGraph>::Delete()`, which does nothing if there is no `OpGraph`
_DELETE_GLOBAL_JOB = "_ZN7oneflow9SingletonINS_7OpGraphEvE6DeleteEv"


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Run the garbage collector now, and disable it until the end of the block."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _class_of_proxy(choose: Callable[[Any], Any], origin: Any) -> Any:
    """Return the class of a proxy for `origin`; None, which may be among modules, is its own."""
    return _nothing if origin is None else choose(origin)


def _nothing(*args: Any) -> None:
    """Return the proxy of None."""


def _set_origin(operation: Callable[..., Any], made: Any, origin: Any) -> None:
    operation(made, origin)
    if origin is not None:
        modules = {name: made._modules.get(name) for name in origin._modules}
        made.__dict__["_modules"] = collections.OrderedDict(modules)


repair(proxy, {"get_proxy_cls": _class_of_proxy})
repair(proxy.ProxyModule, {"_oneflow_internal_graphblock__set_origin": _set_origin})


class CompiledGraph(nn.Graph):
    """An `nn.Graph` that compiles safely even if another graph is destroyed meanwhile.

    OneFlow 0.9 keeps the variables of the graph being built in one global table, and the destructor
    of *any* graph clears this table. Garbage collection during a build can therefore cause "must be
    a variable created in nn.Graph", or worse.
    """

    def __init__(self) -> None:
        close_launch_race()
        if is_on("lean-kernels"):
            replace_functions("lean-kernels")
        with without_harmless_lines():
            super().__init__()

    def build_graph(self, *args: Any, **kwargs: Any) -> Any:
        with garbage_kept():
            return super().build_graph(*args, **kwargs)

    def finish_complie_and_init_runtime(self, *args: Any) -> Any:
        """Plan the job and start its threads, then release the memory that was only needed for
        this.
        """
        try:
            result = super().finish_complie_and_init_runtime(*args)
        except Exception:
            # OneFlow 0.9 keeps the failed job in a global variable, so the next compilation would
            # end the process
            with contextlib.suppress(Unavailable, AttributeError):
                getattr(open_oneflow(), _DELETE_GLOBAL_JOB)()
            raise
        release_memory()
        return result

    def _Graph__print(self, *_: object) -> None:
        """Print nothing, because OneFlow also raises the failures that it prints."""

    def _Graph__rebuild_outputs(self, out2name: Any = None) -> None:
        """Edit the job. OneFlow calls this method between completing and planning the job."""
        self.edit_job(out2name)
        super()._Graph__rebuild_outputs(out2name)

    def edit_job(self, out2name: Any) -> None:
        """Edit the completed job, `self._full_job_proto`.

        `out2name` maps each output tensor to its name.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph as `nn.Graph.__call__` does.

        After compilation, skip its traversal of nested arguments.
        """
        if self._can_skip_trees and not args:
            return self._call_compiled(kwargs)
        outputs = super().__call__(*args, **kwargs)
        if not args:
            # nn.Graph determines the order of input tensors, so skip its traversal only if our
            # order is the same
            expected = self._Graph__flatten_io("input", **kwargs)
            is_same_order = [id(tensor) for tensor in tensors_in(kwargs)] == [
                id(tensor) for tensor in expected
            ]
            self._can_skip_trees = is_same_order and _is_plain(outputs)
        return outputs

    #: True once a call with keyword arguments has shown that `_call_compiled` passes the same
    #: inputs as nn.Graph
    _can_skip_trees = False
    _cur_index_of_ouputs_buffer: int

    def _call_compiled(self, inputs: dict[str, Any]) -> Any:
        """Run the graph as `nn.Graph.__run` in OneFlow 0.9.0 does.

        The launch itself checks shapes and dtypes.
        """
        flat = tensors_in(inputs)
        for tensor in flat:
            if not tensor.is_contiguous():
                tensor.contiguous_()
        index = self._cur_index_of_ouputs_buffer
        outputs = self._outputs_tensor_tuple_buffer[index]
        native = flow._oneflow_internal.nn.graph
        native.RunLazyNNGraph(
            convert_to_tensor_tuple(flat), outputs, self._state_tensor_tuple, self._c_nn_graph
        )
        # bypass nn.Graph.__setattr__, which checks every value for modules
        self.__dict__["_cur_index_of_ouputs_buffer"] = (index + 1) % self._outputs_buffer_size
        # return copies, because the buffer is reused later
        copied = map_tensors(self._eager_outputs_buffer[index][0], _copy)
        native.SoftSyncNNGraphBuffers(outputs, self._c_nn_graph)
        return copied


def lend_variables(graph: nn.Graph, tensors: Mapping[str, flow.Tensor]) -> None:
    """Make a traced `graph` use `tensors` as its variables of these names, instead of creating
    tensors of its own.

    Call this between tracing and planning. Names without a variable in the job are ignored: OneFlow
    0.9 refuses them.
    """
    operations = graph._full_job_proto.net.op
    names = [op.name for op in operations if op.HasField("variable_conf") and op.name in tensors]
    lent = convert_to_tensor_tuple([tensors[name] for name in names])
    graph._c_nn_graph.register_additional_variable_names_and_tensors(names, lent)


def own_variables(graph: nn.Graph) -> dict[str, flow.Tensor]:
    """Return the variables of a planned `graph` that are not in its module, by name, and name them
    in its launches.

    They share memory with lent tensors. OneFlow 0.9 orders a launch only with eager operations on
    the tensors that the launch names, which are the tensors of the module. With these variables
    named too, an eager read sees the updates launched before it, and a launch sees the eager writes
    before it.
    """
    job = graph._c_nn_graph
    tensors = list(job.additional_var_tensors)
    named = convert_to_tensor_tuple([*graph._state_tensor_tuple, *tensors])
    # bypass nn.Graph.__setattr__, which checks every value for modules
    graph.__dict__["_state_tensor_tuple"] = named
    return dict(zip(job.additional_var_names, tensors))


def _is_plain(value: Any) -> bool:
    """Return True if `value` contains only tensors and None in plain dicts, lists and tuples.

    `map_tensors` can copy such values.
    """
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, flow.Tensor)


# one wrapper for all names of an operation: other replacements then find every name
@functools.cache
def _reading_twice(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `operation` that copies the second argument if it is the same tensor as
    the first.

    OneFlow 0.9.0 may choose two layouts for the arguments. It ends the process if both arguments
    are the same tensor (`op_graph.cpp:150] Check failed`).
    """

    return repaired(_distinct, operation)


def _distinct(
    operation: Callable[..., Any], one: Any, other: Any, *args: Any, **kwargs: Any
) -> Any:
    if one is other and isinstance(one, flow.Tensor) and one.is_lazy and one.is_global:
        other = flow._C.identity(other)
    return operation(one, other, *args, **kwargs)


_OF_TWO = [
    *("__mul__", "__truediv__", "__matmul__", "__pow__"),
    *("mul", "multiply", "div", "matmul", "bmm", "dot", "mm", "pow"),
]
#: `(owner, name, replacement)` of the operations that may read the same tensor twice
READING_TWICE = [
    (owner, name, _reading_twice(vars(owner)[name]))
    for owner, name in itertools.product((flow.Tensor, flow, flow._C), _OF_TWO)
    if name in vars(owner)
]


class Uncompilable(GraphBuildError):
    """A graph would lose a part of the model, or end the process. Eager updates train the model.

    The arguments are the reason, and what to change for a compiled step.
    """


def refuse_uncompilable(
    proxy: Any, known: Sequence[str], accumulates: bool, uses_zero: bool
) -> None:
    """Raise `Uncompilable` if the traced model has a part that OneFlow 0.9 cannot compile.

    Such parts are writes to trainable parameters that are not among the `known`. With accumulation
    they are also writes to their `requires_grad`, batch normalizations without running statistics
    and, with ZeRO, gradient hooks of parameters. `proxy`: the graph's proxy of the model.
    """
    for path, owner in proxy.named_modules():
        module = owner.to(nn.Module)
        if accumulates and isinstance(module, _BatchNorm) and module.running_mean is None:
            raise Uncompilable(
                f"{path} is a batch normalization without running statistics, which a OneFlow "
                "0.9 graph with accumulation cannot contain",
                "remove track_running_stats=False or set train.num_accumulation_steps=1",
            )
        for name, parameter in owner.__dict__["_parameters"].items():
            traced = parameter.lazy_origin  # None if forward has not read it
            full_name = f"{path}.{name}".lstrip(".")
            if accumulates and uses_zero and hooks_of_parameter(parameter.to(flow.Tensor)):
                raise Uncompilable(
                    f"{full_name} has a gradient hook, and a OneFlow 0.9 graph with accumulation "
                    "and ZeRO would end the process",
                    "set train.num_accumulation_steps=1, or leave out ZeRO",
                )
            if (
                traced is None
                or not traced.requires_grad
                or traced.grad_fn is not None
                or full_name in known
            ):
                continue
            # a write turns the traced parameter into a leaf; `requires_grad_` does not
            if traced.is_leaf or accumulates:
                raise writes_to(full_name)


def writes_to(name: str) -> Uncompilable:
    """Return the error for a forward that writes to the trainable parameter `name`, or to its
    `requires_grad`.
    """
    return Uncompilable(
        f"forward changes the trainable parameter {name}, and a graph would lose the change or "
        "its gradient",
        "change it in a hook (after_step), freeze it if nothing trains it, or, for changes of "
        "requires_grad, set train.num_accumulation_steps=1",
    )
