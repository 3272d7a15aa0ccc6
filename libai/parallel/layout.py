"""Distribute a module over a mesh, and move its inputs and outputs between ranks.

`parallelize` converts the parameters and buffers of a plain module to global tensors according to a
plan, and makes its blocks fetch their inputs from the previous stage. A layout object then provides
the trainers with everything that depends on the mesh. `LocalLayout` is for a module with local
tensors (one process, or one replica per process); `GlobalLayout` is for all other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.parallel.data_parallel import require_equal_modules
from libai.parallel.mesh import Mesh
from libai.parallel.plan import ParallelPlan, ShardingPlan, TensorLayout, named_tensors
from libai.parallel.recompute import recompute_in_backward
from libai.parallel.zero import compute_with_full_parameters
from libai.patches.global_tensors import (
    give_initial_states,
    move_to,
    repair_assignments,
    repair_global_operations,
    source_ops,
    stages_meet,
)
from libai.patches.wrapping import wrap_forward
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError
from libai.utils.rank_notes import own_state
from libai.utils.tensors import full_tensor, map_tensors, memory_of, tensors_in

Batch = dict[str, flow.Tensor]
_NOTHING = nullcontext()


class LocalLayout:
    """A layout in which every tensor is local, so nothing has to be moved."""

    sharding: ShardingPlan | None = None
    is_global = False
    #: True if ranks hold different parts of the parameters, which a compiled job may send between
    #: ranks
    cuts_parameters = False

    def __init__(self, mesh: Mesh):
        repair_assignments()
        self.mesh = mesh
        #: number of ranks that hold a replica and differentiate the losses of their own samples
        self.replicas = mesh.data

    def lay_out_batch(self, batch: Batch) -> dict[str, flow.Tensor]:
        """Return this rank's micro-batch in the layout that the model expects."""
        return batch

    #: the same as `lay_out_batch`, for a batch that is identical on all ranks
    lay_out_replicated_batch = lay_out_batch

    def replicate(self, tensor: flow.Tensor, stage: int | None = None) -> flow.Tensor:
        """Return a small tensor that is equal on all ranks, for use on `stage` (default: the stage
        of the losses).
        """
        return tensor.to(self.mesh.device)

    def constant(self, value: float, size: int, stage: int) -> flow.Tensor:
        """Return a float32 tensor of shape `(size,)` on `stage` filled with `value`.

        Does not communicate.
        """
        # from_numpy runs no operation that a step would have to wait for
        tensor = flow.from_numpy(np.array([value] * size, np.float32))
        return tensor if self.mesh.device == "cpu" else tensor.to(self.mesh.device)

    def describe(self) -> str:
        """Return a one-line description of the mesh for the log."""
        return self.mesh.describe()

    def stage_of(self, parameter_name: str) -> int:
        """Return the pipeline stage of a parameter."""
        return 0

    def source_ops(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass, in which new tensors (`flow.zeros`) match the
        model's layout.
        """
        return _NOTHING

    def local_output(
        self,
        tensor: flow.Tensor,
        num_samples: int,
        is_replicated: bool = False,
        everywhere: bool = False,
    ) -> flow.Tensor:
        """Return this rank's part of a model output: its own samples, or the full tensor if it is
        not per sample.
        """
        return tensor

    @property
    def sees_outputs(self) -> bool:
        """True if this rank's `local_output` should be used; False if another rank returns the same
        or only output.
        """
        return True


def _different_shapes(batch: Batch) -> str:
    """Return the error message for the batches of the ranks. Collective."""
    shapes = gather_objects({name: tensor.shape for name, tensor in batch.items()})
    of_ranks = ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(shapes))
    return (
        f"the loader returned batches of different shapes: {of_ranks}. Graph mode and "
        "global tensors divide one batch evenly among the ranks. Return the same number of samples "
        "on every rank and pad them to one length (build_train_loader does the first, and the "
        "second if the dataset has `lengths`), or train replicas eagerly "
        "(train.dist.gradient_reduction=auto): they count each sample once, and each token if the "
        "model defines num_loss_items."
    )


class GlobalLayout:
    """A layout with parameters, buffers and batches as global tensors on the stages of a mesh.

    See `LocalLayout` for the methods.
    """

    is_global = True
    replicas = 1

    def __init__(self, sharding: ShardingPlan):
        repair_assignments()
        repair_global_operations()
        self.sharding = sharding
        self.mesh = sharding.mesh
        self.cuts_parameters = sharding.shares_parameters or not self.mesh.is_data_parallel_only
        self._everyone = self.mesh.placement()
        self._placements = [self.mesh.stage_placement(stage) for stage in range(self.mesh.pipeline)]
        broadcast = flow.sbp.broadcast
        self._full = self.mesh.sbp(broadcast, broadcast)
        self._samples = self.mesh.sbp(
            flow.sbp.split(0) if self.mesh.data > 1 else broadcast, broadcast
        )

    def lay_out_batch(self, batch: Batch) -> dict[str, flow.Tensor]:
        """See `LocalLayout`. Every rank passes the samples of its data rank. Collective.

        Raises `UserError` on all ranks if the shapes differ.
        """
        tensors = {}
        own_state().collectives += 1
        for name, tensor in batch.items():
            placement = self._placements[self.sharding.stage_of(name)]
            try:
                tensors[name] = tensor.to_global(placement=placement, sbp=self._samples)
            except RuntimeError as error:  # on all ranks
                if "Sizes of tensors" not in str(error):
                    raise
                raise UserError(_different_shapes(batch)) from None
            # OneFlow accepts some unequal numbers of samples, but a compiled step would fit the
            # batches of some ranks only
            if tensor.ndim and tensors[name].shape[0] != tensor.shape[0] * self.mesh.data:
                raise UserError(_different_shapes(batch))
        return tensors

    def lay_out_replicated_batch(self, batch: Batch) -> dict[str, flow.Tensor]:
        """See `LocalLayout`. Collective."""
        return {
            name: self.replicate(tensor, self.sharding.stage_of(name))
            for name, tensor in batch.items()
        }

    def replicate(self, tensor: flow.Tensor, stage: int | None = None) -> flow.Tensor:
        """See `LocalLayout`. Collective."""
        placement = self._placements[self.sharding.tail if stage is None else stage]
        tensor = tensor.to(self.mesh.device).to_global(
            placement=self._everyone, sbp=flow.sbp.broadcast
        )
        return tensor.to_global(placement=placement, sbp=self._full)

    def constant(self, value: float, size: int, stage: int) -> flow.Tensor:
        return flow._C.global_constant(
            (size,), value, dtype=flow.float32, placement=self._placements[stage], sbp=self._full
        )

    def describe(self) -> str:
        if self.mesh.pipeline == 1:
            return self.mesh.describe()
        counts = " + ".join(map(str, self.sharding.blocks_per_stage))
        return f"{self.mesh.describe()}; blocks per stage {counts}"

    def stage_of(self, parameter_name: str) -> int:
        return self.sharding.tensors[parameter_name].stage

    def stage_of_module(self, name: str) -> int | None:
        return self.sharding.stage_of_module(name)

    def placement(self, stage: int) -> Any:
        """Return the OneFlow placement of a stage."""
        return self._placements[stage]

    def source_ops(self) -> AbstractContextManager[Any]:
        """See `LocalLayout`.

        With pipeline stages, the stage of a source op is unknown, so source ops are unchanged.
        Instead, the context allows operations on tensors of different stages.
        """
        if self.mesh.pipeline > 1:
            return stages_meet(self._placements)
        return source_ops(self._placements[0], self._full)

    def local_output(
        self,
        tensor: flow.Tensor,
        num_samples: int,
        is_replicated: bool = False,
        everywhere: bool = False,
    ) -> flow.Tensor:
        """See `LocalLayout`. `num_samples` is the size of this rank's micro-batch. Collective.

        The result is empty on ranks of other stages than the output's, unless `everywhere` is set.
        """
        if not tensor.is_global:
            return tensor
        rows = num_samples * self.mesh.data
        per_sample = not is_replicated and tensor.ndim > 0 and tensor.shape[0] == rows
        sbp = self._samples if per_sample else self._full
        tensor = tensor.to_global(placement=tensor.placement, sbp=sbp)
        if not everywhere:
            return tensor.to_local()
        copies = [tensor.to_global(placement=placement, sbp=sbp) for placement in self._placements]
        return copies[self.mesh.pipeline_rank].to_local()

    @property
    def sees_outputs(self) -> bool:
        return self.mesh.pipeline_rank == self.sharding.tail and self.mesh.tensor_rank == 0


Layout = LocalLayout | GlobalLayout


def parallelize(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh,
    zero_stage: int = 0,
    recomputed_blocks: Sequence[str] = (),
) -> GlobalLayout:
    """Distribute `module` over `mesh` according to `plan`, in place.

    Call it once per module. Collective.

    Parameters stay the same objects, so an existing optimizer keeps working. Initial values are
    those of rank 0. The module's code needs no change: the classes of blocks on later stages are
    replaced by subclasses that fetch their inputs. See `ParallelPlan.arrange` for the errors.

    Args: zero_stage: above 0, data-parallel ranks share the parameters (`libai.parallel.zero`).
        recomputed_blocks: names of modules that recompute their activations in an eager backward
        pass.
    """
    require_equal_modules(module)
    sharding = plan.arrange(module, mesh, shares_parameters=zero_stage > 0)
    layout = GlobalLayout(sharding)
    with memory_shared(module):
        for name, parameter in module.named_parameters():
            parameter.data = _lay_out(parameter.data, sharding.tensors[name], layout)
        _exchange_tensors(
            module,
            lambda name, buffer: _lay_out(buffer, sharding.tensors[name], layout),
            lambda name, constant: layout.replicate(constant, sharding.stage_of_module(name) or 0),
        )
    give_initial_states(module)
    if sharding.shares_parameters:
        full = {
            name: _sbp_of(where, mesh, is_shared=False)
            for name, where in sharding.tensors.items()
            if where.data_axis is not None
        }
        # a recomputed block keeps no saved tensors anyway
        gathers_again = zero_stage == 3 and not recomputed_blocks
        compute_with_full_parameters(module, full, list(sharding.stage_of_block), gathers_again)
    recompute_in_backward(module, recomputed_blocks)
    if mesh.pipeline > 1:
        _connect_stages(module, sharding, layout)
    return layout


def _lay_out(tensor: flow.Tensor, where: TensorLayout, layout: GlobalLayout) -> flow.Tensor:
    mesh = layout.mesh
    placement = layout.placement(where.stage)
    broadcast = flow.sbp.broadcast
    if not tensor.is_global:
        tensor = tensor.to(mesh.device).to_global(placement=mesh.placement(), sbp=broadcast)
    # move to the stage first and change the layout second: oneflow 0.9.0 supports each of these as
    # a separate boxing
    tensor = tensor.to_global(placement=placement, sbp=mesh.sbp(broadcast, broadcast))
    return tensor.to_global(placement=placement, sbp=_sbp_of(where, mesh)).detach().clone()


def _sbp_of(where: TensorLayout, mesh: Mesh, is_shared: bool = True) -> list[Any]:
    """Return the sbp of a tensor, split over data-parallel ranks only if `is_shared`."""
    over_data = (
        flow.sbp.broadcast
        if where.data_axis is None or not is_shared
        else flow.sbp.split(where.data_axis)
    )
    return mesh.sbp(
        over_data, flow.sbp.broadcast if where.axis is None else flow.sbp.split(where.axis)
    )


@contextmanager
def memory_shared(module: nn.Module) -> Iterator[None]:
    """Restore, after the block, that tensors of `module` share memory (`b.data = a.data`).

    Raises `UserError` for a tensor that is another view of a tensor (a part, a transpose), because
    new tensors could not be.
    """
    tensors = dict(named_tensors(module))
    spans = sorted((*memory_of(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    pairs = []
    for (start, end, one), (other_start, other_end, other) in pairwise(spans):
        if other_start < end:
            views = [(tensors[name].shape, tensors[name].stride()) for name in (one, other)]
            if (start, end) != (other_start, other_end) or views[0] != views[1]:
                raise UserError(
                    f"{one} and {other} are different views of the same memory, which contiguous "
                    "or global tensors cannot be. Clone one of them."
                )
            pairs.append((one, other))
    yield
    tensors = dict(named_tensors(module))
    for one, other in pairs:
        tensors[other].data = tensors[one].data


#: (name of a buffer or module, tensor) → replacement tensor
_Change = Callable[[str, flow.Tensor], flow.Tensor]


def _exchange_tensors(module: nn.Module, change_buffer: _Change, change_constant: _Change) -> None:
    """Replace the buffers, which modules may share, and constant tensors stored as plain attributes
    of modules.
    """
    buffers = dict(module.named_buffers())
    renewed = {id(buffer): change_buffer(name, buffer) for name, buffer in buffers.items()}

    def exchanged(name: str, tensor: flow.Tensor) -> flow.Tensor:
        if id(tensor) in renewed:
            return renewed[id(tensor)]
        return tensor if tensor.requires_grad else change_constant(name, tensor)

    for name, child in module.named_modules():
        child._buffers.update(
            {key: renewed.get(id(buffer), buffer) for key, buffer in child._buffers.items()}
        )
        for attribute in sorted(
            vars(child).keys() - vars(nn.Module()).keys()
        ):  # same order on all ranks
            value = vars(child)[attribute]
            is_known = type(value) in (flow.Tensor, list, tuple, dict)
            if is_known and any(not tensor.requires_grad for tensor in tensors_in(value)):
                vars(child)[attribute] = map_tensors(value, partial(exchanged, name))


def _connect_stages(module: nn.Module, sharding: ShardingPlan, layout: GlobalLayout) -> None:
    def fetching(stage: int) -> Callable[[flow.Tensor], flow.Tensor]:
        return partial(move_to, placement=layout.placement(stage))

    blocks = sharding.stage_of_block
    modules = dict(module.named_modules())
    for name, child in modules.items():
        stage = sharding.stage_of_module(name)
        if name in blocks:
            # every block fetches, not only the first of a stage: other inputs, such as a mask, come
            # from stage 0
            is_fetching = stage != 0
        else:
            # the value of a residual connection around the last block is on that block's stage
            is_in_block = any(name.startswith(f"{block}.") for block in blocks)
            is_fetching = stage is not None and not is_in_block and not child._modules
        if is_fetching and stage is not None:
            _wrap_input(child, fetching(stage))
    last = list(blocks)[-1]
    if blocks[last] != sharding.tail:
        _wrap_output(modules[last], fetching(sharding.tail))
    _wrap_output(module, fetching(sharding.tail))


def _wrap_input(module: nn.Module, change: Callable[[flow.Tensor], flow.Tensor]) -> None:
    """Apply `change` to every tensor in the arguments of `module`."""

    def run(
        proxy: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return forward(proxy, *map_tensors(args, change), **map_tensors(kwargs, change))

    wrap_forward(module, run)


def _wrap_output(module: nn.Module, change: Callable[[flow.Tensor], flow.Tensor]) -> None:
    """Apply `change` to every tensor that `module` returns."""
    wrap_forward(
        module,
        lambda proxy, forward, args, kwargs: map_tensors(forward(proxy, *args, **kwargs), change),
    )


def localize(module: nn.Module) -> None:
    """Convert global parameters and buffers of `module` to local ones, with the full tensor on
    every rank.

    Collective.

    Parameters stay the same objects and lose their gradients.
    """
    with memory_shared(module):
        for parameter in module.parameters():
            parameter.grad = None
            if parameter.is_global:
                parameter.data = full_tensor(parameter)
        _exchange_tensors(
            module, lambda _, buffer: _localized(buffer), lambda _, constant: _localized(constant)
        )


@contextmanager
def localized(module: nn.Module) -> Iterator[None]:
    """Localize `module` inside the block (see `localize`), and restore its global tensors
    afterwards.

    Collective.

    Inside the block the module runs as in a single process. This needs memory for the whole module
    on every rank.
    """
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    holders = [(vars(child), dict(vars(child)), dict(child._buffers)) for child in module.modules()]
    localize(module)
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.grad = None
            parameter.data = data
        for attributes, before, buffers in holders:
            attributes.update(before)
            attributes["_buffers"].update(buffers)


def _localized(tensor: flow.Tensor) -> flow.Tensor:
    return full_tensor(tensor) if tensor.is_global else tensor
