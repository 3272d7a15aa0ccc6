"""The table of PyTorch's names for which OneFlow 0.9.0 has nothing or something else, and reasons
for names without a counterpart.

A name that is not in the table is OneFlow's.
"""

from __future__ import annotations

import contextlib
import math
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import oneflow as flow
from oneflow import nn

from libai.torch_names import (
    data,
    functional,
    functions,
    layers,
    optimizers,
    schedules,
    tensors,
    transformer,
)


def _own_names(prefix: str, module: ModuleType) -> dict[str, Any]:
    """Return the public names that `module` defines, as rows of the table."""
    return {
        f"{prefix}.{name}": value
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
    }


def _same(value: Any = None, *args: Any, **options: Any) -> Any:
    """Return the model or function itself, or this decorator if there are only options."""
    return _same if value is None else value


def _nothing(*args: Any, **options: Any) -> None:
    """Do nothing."""


class _NoContext(contextlib.ContextDecorator):
    """Change nothing: the trainer decides about mixed precision (`train.amp`)."""

    def __init__(self, *args: Any, **options: Any):
        """Ignore the arguments."""

    def __enter__(self) -> None:
        """Change nothing."""

    def __exit__(self, *error: Any) -> None:
        """Change nothing."""


def _false() -> bool:
    return False


NAMES: dict[str, Any] = {
    **_own_names("torch", functions),
    **_own_names("torch.nn", layers),
    **_own_names("torch.nn", transformer),
    **_own_names("torch.nn.functional", functional),
    **_own_names("torch.optim", optimizers),
    **_own_names("torch.optim.lr_scheduler", schedules),
    **_own_names("torch.utils.data", data),
    # only make a model faster
    "torch.compile": _same,
    "torch.nn.DataParallel": _same,
    "torch.jit.script": _same,
    "torch.jit.ignore": _same,
    "torch.jit.export": _same,
    "torch.set_float32_matmul_precision": _nothing,
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cudnn.deterministic": True,
    "torch.backends.cuda.matmul.allow_tf32": False,
    "torch.autocast": _NoContext,
    "torch.amp.autocast": _NoContext,
    "torch.cuda.amp.autocast": _NoContext,
    "torch.backends.cuda.sdp_kernel": _NoContext,
    "torch.nn.attention.sdpa_kernel": _NoContext,
    "torch.nn.attention.SDPBackend": SimpleNamespace(
        MATH=0, FLASH_ATTENTION=1, EFFICIENT_ATTENTION=2, CUDNN_ATTENTION=3
    ),
    # end the process without a GPU
    "torch.cuda.manual_seed": _nothing,
    "torch.cuda.manual_seed_all": _nothing,
    # other places and older names
    "torch.autograd.Variable": _same,
    "torch.nn.parameter.Parameter": nn.Parameter,
    "torch.nn.modules.module.Module": nn.Module,
    "torch.nn.modules.Module": nn.Module,
    "torch.nn.Dropout1d": layers.Dropout2d,
    "torch.nn.Dropout3d": layers.Dropout2d,
    "torch.nn.functional.upsample": nn.functional.interpolate,
    "torch.nn.functional.relu_": nn.functional.relu,
    "torch.nn.init.kaiming_normal": nn.init.kaiming_normal_,
    "torch.nn.init.xavier_normal": nn.init.xavier_normal_,
    "torch.nn.init.xavier_uniform": nn.init.xavier_uniform_,
    "torch.nn.init.constant": nn.init.constant_,
    "torch.nn.utils.parametrizations.weight_norm": nn.utils.weight_norm,
    "torch.functional.norm": functions.norm,
    "torch.concatenate": flow.cat,
    "torch.true_divide": flow.div,
    "torch.spmm": flow.matmul,
    "torch.cosine_similarity": nn.functional.cosine_similarity,
    "torch.sigmoid_": flow.sigmoid,
    "torch.autograd.function.Function": flow.autograd.Function,
    # annotations for TorchScript
    "torch.jit.unused": _same,
    "torch.jit.Final": Final,
    "torch.jit.is_tracing": _false,
    # facts
    "torch.pi": math.pi,
    "torch.inf": math.inf,
    "torch.__version__": "2.0.0",
    "torch.distributed.is_available": _false,
    "torch.distributed.is_initialized": _false,
    "torch.backends.mps.is_available": _false,
    "torch.jit.is_scripting": _false,
}

_FOURIER = "OneFlow 0.9.0 has no Fourier transforms"
_COMPLEX = "OneFlow 0.9.0 has no complex numbers"
_SPARSE = "OneFlow 0.9.0 has no sparse tensors"
_REWRITING = "programs that rewrite or export models need PyTorch"
#: beginnings of names
_REASONS = {
    "torch.fft.": _FOURIER,
    "torch.stft.": _FOURIER,
    "torch.complex": _COMPLEX,
    "torch.cfloat.": _COMPLEX,
    "torch.view_as": _COMPLEX,
    "torch.polar.": _COMPLEX,
    "torch.sparse": _SPARSE,
    "torch.linalg.": "OneFlow 0.9.0 has only norms and products of matrices",
    "torch.distributed.": "the trainer starts the processes (train.dist)",
    "torch.func.": _REWRITING,
    "torch.fx.": _REWRITING,
    "torch.jit.": _REWRITING,
    "torch.nn.utils.parametrize.": _REWRITING,
    "torch.ops.": "kernels for PyTorch need PyTorch",
    "torch.utils.cpp_extension.": "kernels for PyTorch need PyTorch",
    "torch.nested.": "OneFlow 0.9.0 has no ragged tensors",
    "torch.distributions.": "OneFlow 0.9.0 has only distributions.Categorical",
    "torch.cuda.amp.GradScaler.": "the trainer scales the loss (train.amp)",
}


def reason_for(path: str) -> str:
    """Return why the name `path` has no counterpart."""
    found = [reason for start, reason in _REASONS.items() if f"{path}.".startswith(start)]
    return found[0] if found else "OneFlow 0.9.0 has no counterpart"


tensors.complete_tensors()
