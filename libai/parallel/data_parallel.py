"""Average gradients over data-parallel ranks, in eager mode.

There are two strategies with a common interface. `FlatReduction` reduces after the last micro-batch
in a few large messages. `OneFlowDDP` lets OneFlow's DDP reduce during every backward pass.
docs/dev/decisions/0006 compares them. Both first broadcast the weights of rank 0. Graph mode needs
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn.parallel import DistributedDataParallel

from libai.parallel.plan import named_tensors
from libai.patches.local_operations import hooks_of_parameter, is_hooked
from libai.utils.distributed import all_reduce, gather_objects, get_world_size
from libai.utils.errors import UserError
from libai.utils.sizes import cut_into_buckets

Reduction = Literal["auto", "flat", "ddp", "global"]
#: Maximum bytes per message. It is large enough to make the 0.5 ms cost of a message negligible,
#: and small enough to keep the copy small compared to all gradients.
BUCKET_BYTES = 25 * 2**20
#: dtypes that OneFlow 0.9.0 can all-reduce on CPU; others crash the process (std::out_of_range in
#: its collective)
_CPU_DTYPES = (flow.float32, flow.float64)
_HALF_DTYPES = (flow.float16, flow.bfloat16)

Losses = Mapping[str, flow.Tensor]
#: function that splits the outputs of a forward pass into `(losses, metrics)`
Split = Callable[[Any], tuple[Losses, Losses]]


class GradientReduction:
    """Base class of the gradient reduction strategies of eager mode. It reduces nothing, because
    the gradients already are averages.

    Attributes: forward: callable to use instead of the model, with the same outputs. set_to_none:
        argument for `optimizer.zero_grad` between iterations. reduced: parameters with gradients
        that are averaged over ranks. leaves_hooks: True if the parameters keep hooks permanently. A
        graph then needs new parameters.
    """

    forward: Callable[..., Any]
    reduced: Sequence[flow.Tensor] = ()
    set_to_none = True
    leaves_hooks = False

    def __init__(self, model: nn.Module):
        self.forward = model

    def clears_to_none(self, asked: bool | None) -> bool:
        """Return the argument for `optimizer.zero_grad` between iterations. None: as fits best.

        Raises `UserError` if the gradients cannot be cleared as `asked`.
        """
        if asked and not self.set_to_none:
            raise UserError(
                "zero_grad_set_to_none=True is not possible with gradient_reduction=ddp, which "
                "keeps the gradient tensors. Use zero_grad_set_to_none=null, or "
                "gradient_reduction=flat."
            )
        return self.set_to_none if asked is None else asked

    def require(self, parameters: Sequence[flow.Tensor], iteration: int) -> None:
        """Raise `UserError` if the gradients of one of the `parameters` are not reduced."""
        known = set(map(id, self.reduced))
        if not all(id(parameter) in known for parameter in parameters if parameter.numel()):
            raise UserError(
                f"iteration {iteration + 1}: the optimizer holds a parameter that the model did "
                "not have when the trainer was built, so its gradients would not be averaged over "
                "ranks. Change the values of the old parameter instead (copy_), or build a new "
                "trainer."
            )

    def reduce(self) -> None:
        """Replace the gradients with their mean over ranks, after the last backward pass of an
        iteration.

        Collective.

        A gradient that no rank has is None afterwards.
        """


def build_reduction(
    kind: Reduction, model: nn.Module, parameters: Sequence[flow.Tensor], split: Split, device: str
) -> GradientReduction:
    """Return the strategy `kind` for the local `model` on this rank's `device`; "auto" is flat on
    CPU and DDP on CUDA.

    `parameters` are the parameters that the optimizer updates. Collective: broadcasts the weights
    and buffers of rank 0 to all ranks. Raises `UserError` on all ranks if models differ between
    ranks or the strategy cannot reduce a dtype.
    """
    require_equal_modules(model)
    if kind == "ddp" or (kind == "auto" and device == "cuda"):
        return OneFlowDDP(model, parameters, split)
    return FlatReduction(model, device)


def require_equal_modules(model: nn.Module) -> None:
    """Raise `UserError` on every rank if parameters or buffers differ between ranks. Collective.

    Names, shapes, dtypes and frozen state are compared. With different models the messages of the
    ranks would not match, and the job would hang.
    """
    mine = [
        f"{n} {tuple(p.shape)} {p.dtype} {'' if p.requires_grad else 'frozen'}"
        for n, p in named_tensors(model)
    ]
    first, *others = gather_objects(mine)
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            pairs = [(a, b) for a, b in zip([*first, "nothing"], [*theirs, "nothing"]) if a != b]
            raise UserError(
                f"the ranks have built different models: rank 0 has {pairs[0][0].strip()} where "
                f"rank {rank} has {pairs[0][1].strip()}, so they cannot train together. Build the "
                "same model on all ranks."
            )


def broadcast_module(model: nn.Module) -> None:
    """Set every parameter and buffer of a local `model` to its value on rank 0. Collective."""
    with flow.no_grad():
        for _, tensor in named_tensors(model):
            if (
                tensor.dtype in _HALF_DTYPES
            ):  # OneFlow 0.9.0 aborts on them on CPU (cpu_broadcast.cpp)
                wide = tensor.data.to(flow.float32)
                flow._C.comm_broadcast(wide, inplace=True)
                tensor.data.copy_(wide.to(tensor.dtype))
            elif tensor.numel():
                flow._C.comm_broadcast(
                    tensor.data, inplace=True
                )  # .data: the call resets requires_grad


class FlatReduction(GradientReduction):
    """Reduce gradients in buckets of one dtype, with one all-reduce per bucket.

    Micro-batches accumulate locally, so the number of messages does not depend on accumulation. The
    messages do not depend on anything that may differ between ranks: they contain every trainable
    parameter, with zeros if this rank has no gradient for it. Ranks that reach different parameters
    therefore cannot deadlock.

    In addition to the gradients, a bucket contains the number of ranks that reach each parameter.
    Only a rank without a gradient for some parameter has to read these counts, which costs one
    synchronization.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", bucket_bytes: int = BUCKET_BYTES):
        super().__init__(model)
        self._bucket_bytes = bucket_bytes
        odd = {
            n: str(p.dtype)
            for n, p in model.named_parameters()
            if p.requires_grad and p.dtype not in _CPU_DTYPES
        }
        if odd and device == "cpu":
            raise UserError(
                "data-parallel eager training on CPU needs float32 or float64 parameters (OneFlow "
                f"0.9 cannot reduce other dtypes over ranks), found {odd}. Keep them in float32."
            )
        broadcast_module(model)
        self.reduced = self._parameters = [p for p in model.parameters() if p.numel()]
        self._trainable: list[bool] = []
        self._buckets: list[_Bucket] = []

    def reduce(self) -> None:
        """See `GradientReduction.reduce`.

        Waits for the device only if this rank lacks a gradient.
        """
        trainable = [p.requires_grad for p in self._parameters]
        if (
            trainable != self._trainable
        ):  # first call, or a hook froze or unfroze parameters on all ranks
            self._trainable = trainable
            chosen = [p for p, is_trained in zip(self._parameters, trainable) if is_trained]
            parts = cut_into_buckets(
                chosen,
                attrgetter("dtype"),
                lambda tensor: tensor.numel() * tensor.element_size(),
                self._bucket_bytes,
            )
            self._buckets = [_Bucket(part) for part in parts]
        with flow.no_grad():
            for bucket in self._buckets:
                bucket.reduce()


class _Bucket:
    """Parameters with gradients sent in one message: `[gradient 0, gradient 1, ..., reached 0,
    reached 1, ...]`.
    """

    def __init__(self, parameters: list[flow.Tensor]):
        self._parameters = parameters
        self._shapes = [tuple(p.shape) for p in parameters]
        self._sizes = [*(p.numel() for p in parameters), len(parameters)]
        self._share = 1.0 / get_world_size()
        self._kind = {"dtype": parameters[0].dtype, "device": parameters[0].device}
        self._missing: list[int] = []
        self._reached = self._reached_here()

    def reduce(self) -> None:
        gradients = [p.grad for p in self._parameters]
        missing = [i for i, gradient in enumerate(gradients) if gradient is None]
        if missing != self._missing:
            self._missing = missing
            self._reached = self._reached_here()
        pieces = [
            flow.zeros(self._sizes[i], **self._kind) if gradient is None else gradient.reshape(-1)
            for i, gradient in enumerate(gradients)
        ]
        joined = flow.cat([*pieces, self._reached])
        flow._C.local_all_reduce(joined, inplace=True)
        *sums, reached = flow.split(joined, self._sizes)
        num_ranks = reached.numpy() if missing else []
        unreached = [i for i in missing if not num_ranks[i]]
        for i, (parameter, total, shape) in enumerate(zip(self._parameters, sums, self._shapes)):
            # assign the product instead of a view: OneFlow 0.9 loses a view's offset in `grad`
            # (decision 0006)
            parameter.grad = None if i in unreached else total.view(shape) * self._share

    def _reached_here(self) -> flow.Tensor:
        flags = np.ones(len(self._parameters))
        flags[self._missing] = 0.0
        return flow.tensor(flags, **self._kind)


class OneFlowDDP(GradientReduction):
    """Reduce gradients with OneFlow's DDP during the backward pass, which is faster if the device
    computes meanwhile.

    OneFlow's DDP supports only float32, reduces once per micro-batch, and sets the gradients of
    unreached parameters to zero. `reduce` sets these gradients back to None. Hooks of DDP stay on
    the parameters permanently.
    """

    # DDP keeps gradients in its buckets, and None would leave stale gradients there
    # (docs/dev/oneflow.md#ddp)
    set_to_none = False
    leaves_hooks = True

    def __init__(self, model: nn.Module, parameters: Sequence[flow.Tensor], split: Split):
        odd = {n: str(p.dtype) for n, p in model.named_parameters() if p.dtype != flow.float32}
        if odd:
            raise UserError(
                "gradient_reduction=ddp needs float32 parameters (OneFlow 0.9's DDP does not "
                f"support others), found {odd}. Keep them in float32, or set "
                "train.dist.gradient_reduction=flat."
            )
        broadcast_module(model)
        self._parameters = list(parameters)
        self.reduced = list(model.parameters())
        self._unreached: list[flow.Tensor] | None = None
        self._adapter = _LossesOnly(model, split)
        self.forward = DistributedDataParallel(
            self._adapter, broadcast_buffers=False, broadcast_parameters=False
        )

    def reduce(self) -> None:
        """See `GradientReduction.reduce`.

        The gradients are already means; those that no rank has are set to None.

        With a zero gradient, momentum and weight decay would change an unreached parameter. Without
        a gradient it stays as it is, which matches `FlatReduction`. In the first iteration all
        ranks determine together which parameters are unreached. Later a parameter counts as reached
        once its gradient, which is equal on all ranks, is nonzero.
        """
        if self._unreached is None:
            reached, self._adapter.reached = self._adapter.reached or set(), None
            flags = all_reduce(
                np.array([p.grad_fn in reached for p in self._parameters], dtype=np.int64), "max"
            )
            self._unreached = [
                p for p, is_reached in zip(self._parameters, flags) if not is_reached
            ]
        if self._unreached:
            self._unreached = [p for p in self._unreached if not p.grad.abs().max().item()]
            for parameter in self._unreached:
                parameter.grad = None


class _LossesOnly(nn.Module):
    """The module that DDP wraps.

    OneFlow's DDP supports only flat dicts of tensors, so only the losses pass through it.

    Metrics bypass DDP.
    """

    def __init__(self, model: nn.Module, split: Split):
        super().__init__()
        self.model = model
        self._split = split
        #: whether each parameter is trained, and whether it has gradient hooks: those that DDP is
        #: about to add
        self._trained = [
            (parameter.requires_grad, parameter.requires_grad) for parameter in model.parameters()
        ]
        #: functions in the autograd graphs of all losses so far; None once they are no longer
        #: needed
        self.reached: set[Any] | None = set()

    def forward(self, **batch: Any) -> Any:
        losses, self._metrics = self._split(self.model(**batch))
        trained = [
            (parameter.requires_grad, is_hooked(parameter)) for parameter in self.model.parameters()
        ]
        if trained != self._trained:
            raise UserError(
                "a parameter was frozen or unfrozen after the trainer was built, and then "
                "OneFlow's DDP does not average all gradients, or ends the process. Freeze it "
                "before, or set train.dist.gradient_reduction=flat."
            )
        if self.reached is not None:
            # must run before DDP connects every parameter to its outputs
            self.reached |= functions_behind(losses.values())
        return losses

    def __call__(self, **batch: Any) -> Any:
        return {"losses": super().__call__(**batch), "metrics": self._metrics}


def functions_behind(tensors: Iterable[flow.Tensor]) -> set[Any]:
    """Return all functions in the autograd graphs of `tensors`, including `p.grad_fn` of every
    reached parameter.
    """
    found = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting.extend(function.next_functions)
    return found


def renew_parameters(model: nn.Module, optimizer: flow.optim.Optimizer) -> None:
    """Replace every parameter with an equal copy without DDP's hooks, in the model and the
    optimizer.

    Tied parameters stay tied, and the user's gradient hooks are kept.
    """
    renewed = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in renewed:
                fresh = nn.Parameter(
                    parameter.detach().clone(), requires_grad=parameter.requires_grad
                )
                for hook in hooks_of_parameter(parameter):
                    fresh.register_hook(hook)
                renewed[id(parameter)] = fresh
            module._parameters[name] = renewed[id(parameter)]
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group._parameters):
            fresh = renewed[id(parameter)]
            optimizer._state[fresh] = optimizer._state.pop(parameter, {})
            group._parameters[index] = fresh
