"""List the patches for OneFlow 0.9.0, both optional and required, and the private OneFlow APIs that
libai uses.

`LIBAI_PATCHES=-openblas,-switch-interval` disables optional patches. Other versions of OneFlow are
refused, unless `LIBAI_ANY_ONEFLOW=1` is set; they then run without the optional patches.
docs/dev/performance.md describes each patch. This file does not contain the patches themselves and
imports only the standard library.
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import re
import sys

from libai.utils.errors import UserError

VARIABLE = "LIBAI_PATCHES"
ONEFLOW_VERSION = "0.9.0"
#: optional patches; their code checks `is_on(name)`
OPTIONAL = (
    "openblas",
    "threads",
    "kernels",
    "layer-norm",
    "dropout-mask",
    "eager-updates",
    "switch-interval",
    "launch-race",
    "polling-thread",
    "step-count",
    "fused-operations",
    "graph-threads",
    "memory-plan",
    "lean-kernels",
    "joined-gradients",
)
#: required patches; without them, results are wrong or the process crashes
NEEDED = (
    "clip-norm",
    "variable-copies",
    "operations",
    "global-operations",
    "buffers-in-place",
    "tracing",
)
#: names in the package oneflow, some with parameters; a name after a colon is an attribute that the
#: class sets itself
PARTS = """\
_C.assign_local_tensor
_C.bias_add
_C.comm_broadcast
_C.constant
_C.conv2d
_C.diagonal
_C.dispatch_adam_update
_C.dispatch_crop_mirror_normalize_from_uint8
_C.dispatch_momentum_update
_C.dispatch_sgd_update
_C.fast_gelu
_C.gelu
_C.global_constant
_C.identity
_C.layer_norm
_C.layer_norm_affine
_C.local_all_reduce
_C.matmul
_oneflow_internal.EmptyCache()
_oneflow_internal.GetCUDAMemoryUsed
_oneflow_internal.autograd.Function.FunctionCtx
_oneflow_internal.eager.Sync()
_oneflow_internal.lazy_mode.is_enabled
_oneflow_internal.nn.graph.RunLazyNNGraph(arg0, arg1, arg2, arg3)
_oneflow_internal.nn.graph.SoftSyncNNGraphBuffers(arg0, arg1)
_oneflow_internal.one.OpBuilder
core.common.data_type_pb2.kDouble
core.common.data_type_pb2.kFloat
framework.tensor_tuple_util.convert_to_tensor_tuple(args)
nn.Graph._Graph__flatten_io(self, io_type, args, kwargs)
nn.Graph._Graph__print
nn.Graph._Graph__rebuild_outputs(self, out2name)
nn.Graph._compile(self, args, kwargs)
nn.Graph._generate_config_proto(self)
nn.Graph.build_graph(self, args, kwargs)
nn.Graph:_c_nn_graph
nn.Graph:_cur_index_of_ouputs_buffer
nn.Graph:_eager_outputs_buffer
nn.Graph:_forward_job_proto
nn.Graph:_full_job_proto
nn.Graph:_is_compiled
nn.Graph:_outputs_buffer_size
nn.Graph:_outputs_tensor_tuple_buffer
nn.Graph:_state_tensor_tuple
nn.graph.proxy.LazyBuilder(name, method)
nn.graph.proxy.ProxyModule
nn.graph.proxy.ProxyParameterDict
nn.graph.proxy.ProxyParameterList
nn.graph.proxy.ProxyTensor
nn.modules.batchnorm._BatchNorm
nn.modules.normalization.layer_norm
nn.modules.rnn.RNNBase
nn.optimizer.lr_scheduler.LRScheduler
optim.SGD._generate_conf_for_graph(self, train_conf, vars_conf)
optim.optimizer.Optimizer
optim.optimizer.ParamGroup(parameters, default_options)
utils.checkpoint.checkpoint
"""


@functools.lru_cache(maxsize=8)
def _left_out(text: str) -> frozenset[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word[:1] != "-" or word[1:] not in OPTIONAL]
    if wrong:
        raise UserError(
            f"{VARIABLE} has {', '.join(map(repr, wrong))}; it lists the optional patches of "
            f"OneFlow to disable, such as -{OPTIONAL[0]},-{OPTIONAL[1]}. These are optional: "
            f"{', '.join(OPTIONAL)}."
        )
    return frozenset(word[1:] for word in words)


def is_on(name: str) -> bool:
    """Return True if the patch `name` is enabled.

    Raises `UserError` if `LIBAI_PATCHES` contains anything other than optional patches.
    """
    left_out = _left_out(os.environ.get(VARIABLE, ""))
    return name in NEEDED or (is_known_version() and name not in left_out)


def is_known_version() -> bool:
    """Return True for OneFlow 0.9.0, and if oneflow is not imported yet."""
    version = getattr(sys.modules.get("oneflow"), "__version__", ONEFLOW_VERSION)
    return version.partition("+")[0] == ONEFLOW_VERSION


def patches_that_are_on() -> list[str]:
    """Return the names of the enabled patches, for reports."""
    return [name for name in (*OPTIONAL, *NEEDED) if is_on(name)]


def missing_parts() -> list[str]:
    """Return the lines of `PARTS` that are missing or different in the imported OneFlow."""
    return [part for part in PARTS.splitlines() if not _is_there(part)]


def _is_there(part: str) -> bool:
    name, _, attribute = part.partition(":")
    name, has_parameters, parameters = name.rstrip(")").partition("(")
    try:
        found = pkgutil.resolve_name(f"oneflow.{name}")
        if attribute:
            return f"self.{attribute}" in inspect.getsource(found)
        return not has_parameters or _parameters_of(found) == parameters
    except (ImportError, AttributeError, OSError, TypeError):
        return False


def _parameters_of(function: object) -> str:
    try:
        return ", ".join(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except ValueError:  # native function: the first line of its docstring contains them
        return ", ".join(re.findall(r"(\w+): ", (function.__doc__ or "").partition(" ->")[0]))


def explain_other_version() -> str | None:
    """Return the message that refuses the imported OneFlow, or None for 0.9.0 and with
    LIBAI_ANY_ONEFLOW=1.
    """
    if is_known_version() or os.environ.get("LIBAI_ANY_ONEFLOW") == "1":
        return None
    missing = missing_parts()
    found = f"{len(missing)} of them are missing or differ: {', '.join(missing[:5])}" + ", …" * (
        len(missing) > 5
    )
    return (
        f"oneflow {sys.modules['oneflow'].__version__} is installed, and libai uses "
        f"{len(PARTS.splitlines())} private parts of oneflow {ONEFLOW_VERSION}; "
        f"{found if missing else 'all of them exist, but are untested'}. Install "
        f"oneflow=={ONEFLOW_VERSION}, or set LIBAI_ANY_ONEFLOW=1 to try this version without the "
        "optional patches."
    )
