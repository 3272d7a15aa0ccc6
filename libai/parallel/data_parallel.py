"""Average the gradients of data-parallel ranks, in eager mode.

Two strategies behind one seam: `FlatReduction` reduces after the last micro-batch, in a few large messages;
`OneFlowDDP` lets OneFlow's DDP reduce during every backward pass. docs/dev/decisions/0006 tells
when which is better. Both make the weights of all ranks those of rank 0 first. Graph mode needs neither.
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
from libai.utils.distributed import all_reduce, gather_objects, get_world_size
from libai.utils.errors import UserError
from libai.utils.sizes import cut_into_buckets

Reduction = Literal["auto", "flat", "ddp", "global"]
#: bytes of one message: half a millisecond, which each costs, does not show, and the copy is small next to gradients
BUCKET_BYTES = 25 * 2**20
#: what OneFlow 0.9.0 can add up on CPU; others end the process (std::out_of_range in its collective)
_CPU_DTYPES = (flow.float32, flow.float64)
_HALF_DTYPES = (flow.float16, flow.bfloat16)

Losses = Mapping[str, flow.Tensor]
#: outputs of a forward → `(losses, metrics)`
Split = Callable[[Any], tuple[Losses, Losses]]


class GradientReduction:
    """What `EagerTrainer` asks of a strategy.

    Attributes:
        forward: what to call in place of the model, with the same result.
        set_to_none: how gradients are cleared between iterations, for `optimizer.zero_grad`.
        reduced: the parameters whose gradients become means.
        leaves_hooks: the parameters keep hooks forever, so that a graph must be given others.
    """

    forward: Callable[..., Any]
    reduced: Sequence[flow.Tensor]
    set_to_none = True
    leaves_hooks = False

    def holds(self, parameters: Sequence[flow.Tensor]) -> bool:
        """Return whether all of `parameters` are among those whose gradients are reduced."""
        known = set(map(id, self.reduced))
        return all(id(parameter) in known for parameter in parameters if parameter.numel())

    def reduce(self) -> None:
        """Turn the gradients into their mean over ranks, after the last backward pass of an iteration. Those that no
        rank has are None afterwards. Collective."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce")


def build_reduction(
    kind: Reduction, model: nn.Module, parameters: Sequence[flow.Tensor], split: Split, device: str
) -> GradientReduction:
    """The strategy `kind` for the local `model` on this rank's `device`; "auto" is flat on CPU and DDP on CUDA.

    `parameters`: what the optimizer updates. Collective: rank 0's weights and buffers are sent to all. Raises
    `UserError` on all ranks for models that differ between ranks and for dtypes that the strategy cannot reduce.
    """
    require_equal_modules(model)
    if kind == "ddp" or (kind == "auto" and device == "cuda"):
        return OneFlowDDP(model, parameters, split)
    return FlatReduction(model, device)


def require_equal_modules(model: nn.Module) -> None:
    """Raise `UserError` on every rank when names, shapes, dtypes or freezing of parameters and buffers differ between
    ranks: their messages would not fit together, and the job would wait forever. Collective."""
    mine = [f"{n} {tuple(p.shape)} {p.dtype} {'' if p.requires_grad else 'frozen'}" for n, p in named_tensors(model)]
    first, *others = gather_objects(mine)
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            pairs = [(a, b) for a, b in zip([*first, "nothing"], [*theirs, "nothing"]) if a != b]
            raise UserError(
                f"the ranks have built different models: where rank 0 has {pairs[0][0].strip()}, rank {rank} has "
                f"{pairs[0][1].strip()}, so their gradients cannot be averaged. Build the same model on all ranks."
            )


def broadcast_module(model: nn.Module) -> None:
    """Give every parameter and buffer of a local `model` the value it has on rank 0. Collective."""
    with flow.no_grad():
        for _, tensor in named_tensors(model):
            if tensor.dtype in _HALF_DTYPES:  # OneFlow 0.9.0 aborts on them on CPU (cpu_broadcast.cpp)
                wide = tensor.data.to(flow.float32)
                flow._C.comm_broadcast(wide, inplace=True)
                tensor.data.copy_(wide.to(tensor.dtype))
            elif tensor.numel():
                flow._C.comm_broadcast(tensor.data, inplace=True)  # .data: it resets requires_grad of what it gets


class FlatReduction(GradientReduction):
    """Joins the gradients into buckets of one dtype, adds each up over ranks in one message, and hands them out again.

    Micro-batches accumulate locally, so that the number of messages does not depend on accumulation. The messages
    depend on nothing that may differ between ranks: every trainable parameter has its place in them, with zeros where
    this rank has no gradient. So ranks that reach different parameters cannot wait for each other.

    Beside the gradients a bucket carries, for each parameter, how many ranks reach it. Only a rank that misses a
    gradient itself has to read that (one synchronisation), because what a rank has itself is reached.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", bucket_bytes: int = BUCKET_BYTES):
        self.forward = model
        self._bucket_bytes = bucket_bytes
        odd = {n: str(p.dtype) for n, p in model.named_parameters() if p.requires_grad and p.dtype not in _CPU_DTYPES}
        if odd and device == "cpu":
            raise UserError(
                f"data-parallel eager training on CPU needs float32 or float64 parameters (OneFlow 0.9 adds up no "
                f"other dtype over ranks), found {odd}. Keep them in float32."
            )
        broadcast_module(model)
        self.reduced = self._parameters = [p for p in model.parameters() if p.numel()]
        self._trainable: list[bool] = []
        self._buckets: list[_Bucket] = []

    def reduce(self) -> None:
        """See `GradientReduction.reduce`. Waits for the device only where this rank misses a gradient."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable != self._trainable:  # the first time, and when a hook has frozen or thawed some, on all ranks
            self._trainable = trainable
            chosen = [p for p, is_trained in zip(self._parameters, trainable) if is_trained]
            parts = cut_into_buckets(chosen, attrgetter("dtype"), _num_bytes, self._bucket_bytes)
            self._buckets = [_Bucket(part) for part in parts]
        with flow.no_grad():
            for bucket in self._buckets:
                bucket.reduce()


def _num_bytes(tensor: flow.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Bucket:
    """Parameters whose gradients travel in one message: `[gradient 0, gradient 1, ..., reached 0, reached 1, ...]`."""

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
            # a product and no view: OneFlow 0.9 forgets where a view begins that `grad` is set to (decision 0006)
            parameter.grad = None if i in unreached else total.view(shape) * self._share

    def _reached_here(self) -> flow.Tensor:
        flags = np.ones(len(self._parameters))
        flags[self._missing] = 0.0
        return flow.tensor(flags, **self._kind)


class OneFlowDDP(GradientReduction):
    """OneFlow's DDP, which reduces during the backward pass: better where the device computes meanwhile.

    It takes float32 only, reduces once per micro-batch, and gives zeros to parameters that no loss reaches; those are
    taken away again. Its hooks stay on the parameters forever.
    """

    # it keeps gradients in its buckets: None would leave stale ones behind (docs/dev/oneflow.md#ddp)
    set_to_none = False
    leaves_hooks = True

    def __init__(self, model: nn.Module, parameters: Sequence[flow.Tensor], split: Split):
        odd = {n: str(p.dtype) for n, p in model.named_parameters() if p.dtype != flow.float32}
        if odd:
            raise UserError(
                f"gradient_reduction=ddp needs float32 parameters (OneFlow 0.9's DDP takes no other), found {odd}. "
                "Keep them in float32, or set train.dist.gradient_reduction=flat."
            )
        broadcast_module(model)
        self._parameters = list(parameters)
        self.reduced = list(model.parameters())
        self._frozen = [parameter for parameter in self.reduced if not parameter.requires_grad]
        self._unreached: list[flow.Tensor] | None = None
        self._adapter = _LossesOnly(model, split)
        self.forward = DistributedDataParallel(self._adapter, broadcast_buffers=False, broadcast_parameters=False)

    def reduce(self) -> None:
        """See `GradientReduction.reduce`: the gradients are means already; take away those that nobody has.

        Momentum and weight decay would move such a parameter; elsewhere it has no gradient and stays as it is. Whether
        it is reached is found out, by all ranks together, in the first iteration. From then on it joins the others as
        soon as its gradient, which is the same on all ranks, is not zero.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UserError(
                "a parameter is trained that was frozen when the trainer was built: OneFlow's DDP would not average "
                "its gradients. Freeze it in a hook's before_train instead, or set train.dist.gradient_reduction=flat."
            )
        if self._unreached is None:
            reached, self._adapter.reached = self._adapter.reached or set(), None
            flags = all_reduce(np.array([p.grad_fn in reached for p in self._parameters], dtype=np.int64), "max")
            self._unreached = [p for p, is_reached in zip(self._parameters, flags) if not is_reached]
        if self._unreached:
            self._unreached = [p for p in self._unreached if not p.grad.abs().max().item()]
            for parameter in self._unreached:
                parameter.grad = None


class _LossesOnly(nn.Module):
    """What DDP wraps: OneFlow's DDP takes flat dicts of tensors only, so names are flattened and metrics bypass it."""

    def __init__(self, model: nn.Module, split: Split):
        super().__init__()
        self.model = model
        self._split = split
        #: the ends of the autograd graphs of all losses so far; None once nobody wants to know
        self.reached: set[Any] | None = set()

    def forward(self, **batch: Any) -> Any:
        losses, self._metrics = self._split(self.model(**batch))
        if self.reached is not None:
            # before DDP connects every parameter to its outputs
            self.reached |= functions_behind(losses.values())
        return losses

    def __call__(self, **batch: Any) -> Any:
        return {"losses": super().__call__(**batch), "metrics": self._metrics}


def functions_behind(tensors: Iterable[flow.Tensor]) -> set[Any]:
    """All functions of the autograd graphs that end in `tensors`; `p.grad_fn` of a reached parameter is among them."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting.extend(function.next_functions)
    return found


def renew_parameters(model: nn.Module, optimizer: flow.optim.Optimizer) -> None:
    """Replace every parameter by an equal new one, in the model and in the optimizer; tied ones stay tied."""
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in renewed:
                fresh = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                renewed[id(parameter)] = fresh
            module._parameters[name] = renewed[id(parameter)]
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group._parameters):
            optimizer._state.pop(parameter, None)
            group._parameters[index] = renewed[id(parameter)]
            optimizer._state[group._parameters[index]] = {}
