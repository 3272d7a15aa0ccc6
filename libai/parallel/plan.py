"""Describe as data how a model's parameters and blocks are distributed over any mesh.

The plan comes from the model's attribute `plan` or from the config (`train.dist.plan`).
`libai.parallel.layout` applies the plan; this file moves no tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import oneflow as flow
from oneflow import nn

from libai.layers.lora import ADAPTER
from libai.parallel.mesh import Mesh
from libai.utils.errors import UserError

_SHOWN_NAMES = 12
#: key of a plan -> type of its value, example
_VALUES = {
    "split": (Mapping, '{"blocks.*.up.weight": 0}'),
    "blocks": (str, '"blocks"'),
    "last": (Sequence, '["head", "labels"]'),
    "divisible": (Sequence, '["blocks.*.num_heads"]'),
}


class TensorLayout(NamedTuple):
    """The location of one parameter or buffer.

    `stage` is its pipeline stage. `axis` is split over tensor-parallel ranks and `data_axis` over
    data-parallel ranks; None means that each rank holds the full tensor.
    """

    stage: int
    axis: int | None
    data_axis: int | None


@dataclass(frozen=True)
class ShardingPlan:
    """A plan resolved for one model and one mesh.

    `tensors` maps the name of every parameter and buffer to its layout. `stage_of_block` maps block
    names, in order, to pipeline stages. `tail` is the stage of the modules that follow the blocks.
    """

    mesh: Mesh
    tensors: Mapping[str, TensorLayout]
    stage_of_block: Mapping[str, int]
    tail: int
    plan: ParallelPlan

    @property
    def shares_parameters(self) -> bool:
        """True if data-parallel ranks hold only parts of some parameters (ZeRO)."""
        return any(layout.data_axis is not None for layout in self.tensors.values())

    @property
    def blocks_per_stage(self) -> list[int]:
        """The number of blocks that each pipeline stage runs."""
        stages = list(self.stage_of_block.values())
        return [stages.count(stage) for stage in range(self.mesh.pipeline)]

    def stage_of_module(self, name: str) -> int | None:
        """Return the stage that runs the module `name`, or None if it spans stages, as the list of
        blocks does.
        """
        if not name or f"{self.plan.blocks}.".startswith(f"{name}."):
            return None
        return self.stage_of(name)

    def stage_of(self, name: str) -> int:
        """Return the stage of a parameter, a buffer, a module, or an argument of the model's
        forward.
        """
        for block, stage in self.stage_of_block.items():
            if f"{name}.".startswith(f"{block}."):
                return stage
        return self.tail if self.plan.is_last(name) else 0


@dataclass(frozen=True)
class ParallelPlan:
    """Rules for distributing one kind of model.

    Args:
        split: pattern of parameter (or buffer) names -> axis that tensor-parallel ranks share.
            Column-parallel linear layers split the outputs (axis 0 of weight and bias).
            Row-parallel layers split the inputs (axis 1 of the weight; the bias is not split).
            Tensors that match no pattern are full tensors on every rank.
        blocks: name of the `ModuleList` (or `Sequential`) that is divided into pipeline stages and
            used for activation checkpointing.
        last: patterns of the parameters and forward arguments (`labels`) that belong to the last
            pipeline stage. By default, modules after the blocks run on the first stage. This is
            correct for every model, including one with a head that shares a weight with the
            embedding.
        divisible: patterns of integer attributes (`blocks.*.attention.num_heads`) that must be
            divisible by the number of tensor-parallel ranks.

    Patterns are shell patterns over dotted names: `blocks.*.mlp.up.weight`.
    """

    split: Mapping[str, int] = field(default_factory=dict)
    blocks: str | None = None
    last: Sequence[str] = ()
    divisible: Sequence[str] = ()

    @classmethod
    def read(cls, description: Any, source: str = "the plan") -> ParallelPlan:
        """Return a plan from a mapping with the keys above, or a given plan.

        Raises `UserError` for anything else.
        """
        if isinstance(description, ParallelPlan):
            return description
        if not isinstance(description, Mapping):
            raise UserError(
                f"{source} is a {type(description).__name__}, not a mapping. Write "
                '{"split": {"blocks.*.up.weight": 0}, "blocks": "blocks"}.'
            )
        for key, value in description.items():
            if key not in _VALUES:
                raise UserError(
                    f"{source} has no key {key!r}. Nearest: {_nearest(str(key), _VALUES)}."
                )
            kind, example = _VALUES[key]
            is_text = isinstance(value, str)
            if value is not None and (not isinstance(value, kind) or is_text != (kind is str)):
                raise UserError(f"{source} has {key}={value!r}. Write {key}={example}.")
        return cls(**{str(key): value for key, value in description.items() if value is not None})

    @classmethod
    def of(cls, model: nn.Module, description: Any = None) -> ParallelPlan:
        """Return `description` as a plan if given, else the model's attribute `plan`, else an empty
        plan.
        """
        if description is not None:
            return cls.read(description, "train.dist.plan")
        return cls.read(getattr(model, "plan", None) or {}, f"{type(model).__name__}.plan")

    def is_last(self, name: str) -> bool:
        """Return True if a pattern of `last` matches `name`, a module that contains it, or its
        contents (`head.*`).
        """
        return any(
            fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") or p == f"{name}.*"
            for p in self.last
        )

    def arrange(
        self, model: nn.Module, mesh: Mesh, shares_parameters: bool = False
    ) -> ShardingPlan:
        """Resolve the plan for `model` (local or global tensors) on `mesh`, without moving tensors.

        Args:
            shares_parameters: split each parameter over data-parallel ranks (ZeRO). The split axis
                is the first one that is divisible by the number of ranks and not split by the plan.
                A parameter without such an axis is not split.

        Raises `UserError` if a pattern matches nothing, an axis is not divisible, or there are more
        stages than blocks. The message lists valid choices.
        """
        named = dict(named_tensors(model))
        axes = self._axes(named, mesh)
        self._check_patterns(model, mesh)
        blocks = self.block_names(model) if self.blocks or mesh.pipeline > 1 else []
        tail = mesh.pipeline - 1 if self.last else 0
        stages = self._stages_of_blocks(model, blocks, mesh, tail)
        tensors: dict[str, TensorLayout] = {}
        sharding = ShardingPlan(mesh, tensors, dict(zip(blocks, stages)), tail, self)
        for name, tensor in named.items():
            axis = axes.get(name)
            is_shared = shares_parameters and mesh.data > 1 and isinstance(tensor, nn.Parameter)
            data_axis = _data_axis(tensor, axis, mesh) if is_shared else None
            tensors[name] = TensorLayout(sharding.stage_of(name), axis, data_axis)
        return sharding

    # ------------------------------------------------------------------ helpers of `arrange`

    def _axes(self, named: Mapping[str, flow.Tensor], mesh: Mesh) -> dict[str, int]:
        """Return tensor name -> axis that is split over tensor-parallel ranks on this mesh."""
        axes = {}
        for pattern, axis in self.split.items():
            for name in _matching(pattern, named, "splits"):
                if ADAPTER.search(name):
                    continue
                shape = tuple(named[name].shape)
                if type(axis) is not int or axis not in range(len(shape)):
                    raise UserError(
                        f"the plan splits {pattern!r} on axis {axis!r}, but {name} has shape "
                        f"{shape}: its axes are {', '.join(map(str, range(len(shape))))}."
                    )
                _check_shared(f"axis {axis} of {name}", shape[axis], mesh)
                if mesh.tensor > 1:
                    axes[name] = axis
                    adapter = (
                        f"{name.removesuffix('weight')}{'lora_A' if axis else 'lora_B'}.weight"
                    )
                    if adapter in named:  # the matrix of the layer's LoRA adapter with this axis
                        axes[adapter] = axis
        if mesh.tensor > 1 and not axes:
            raise UserError(
                f"train.dist.tensor_parallel_size={mesh.tensor}, but no plan names parameters to "
                "split, so every rank would do the same work. Add an attribute plan = {'split': "
                "{pattern: axis}} to the model class, or set train.dist.plan in the config."
            )
        return axes

    def _check_patterns(self, model: nn.Module, mesh: Mesh) -> None:
        modules = dict(model.named_modules())
        for pattern in self.divisible:
            owner, _, attribute = pattern.rpartition(".")
            for name in _matching(owner, modules, f"needs a divisible {attribute} of"):
                value = getattr(modules[name], attribute, None)
                if not isinstance(value, int):
                    raise UserError(
                        f"the plan's `divisible` names {pattern}, which is {value!r}, not a whole "
                        "number."
                    )
                _check_shared(f"{name}.{attribute}".lstrip("."), value, mesh)

    def block_names(self, model: nn.Module) -> list[str]:
        """Return the names of the blocks in order.

        Raises `UserError` if the plan does not name a list of blocks.
        """
        modules = dict(model.named_modules())
        lists = [
            name
            for name, module in modules.items()
            if name and isinstance(module, nn.ModuleList | nn.Sequential)
        ]
        if self.blocks not in lists:
            raise UserError(
                "pipeline stages and activation checkpointing divide a model between its blocks, "
                f"but blocks={self.blocks!r} of the plan does not name a ModuleList or "
                f"Sequential. Give {type(model).__name__} an attribute plan = {{'blocks': name}}, "
                "or set train.dist.plan.blocks. Lists in this model: "
                f"{', '.join(lists) or 'none'}."
            )
        return [f"{self.blocks}.{name}" for name, _ in modules[self.blocks].named_children()]

    def _stages_of_blocks(
        self, model: nn.Module, names: Sequence[str], mesh: Mesh, tail: int
    ) -> list[int]:
        """Return the stage of each block.

        All parameters, in order of use, are divided into equal parts, one per stage. A block goes
        to the stage that contains its middle. Every stage gets at least one block.
        """
        if mesh.pipeline > max(1, len(names)):
            raise UserError(
                f"train.dist.pipeline_parallel_size={mesh.pipeline}, but {self.blocks} has "
                f"{len(names)} block(s), and every stage needs one. Use at most {len(names)} "
                "stages."
            )
        costs = dict.fromkeys(names, 0)
        total = done = 0
        for name, parameter in model.named_parameters():
            total += parameter.numel()
            block = next((block for block in names if name.startswith(f"{block}.")), None)
            if block is not None:
                costs[block] += parameter.numel()
            elif tail == 0 or not self.is_last(name):
                done += parameter.numel()
        stages: list[int] = []
        for index, cost in enumerate(costs.values()):
            previous = stages[-1] if stages else -1
            stage = int(mesh.pipeline * (done + cost / 2) / max(total, 1))
            stage = min(max(stage, previous, 0), previous + 1, mesh.pipeline - 1)
            stages.append(
                max(stage, mesh.pipeline - (len(names) - index))
            )  # leave enough blocks for the remaining stages
            done += cost
        return stages


def named_tensors(model: nn.Module) -> list[tuple[str, flow.Tensor]]:
    """Return names and tensors: all parameters of `model`, then all buffers.

    Tied tensors have their first name.
    """
    return [*model.named_parameters(), *model.named_buffers()]


def _data_axis(tensor: flow.Tensor, taken: int | None, mesh: Mesh) -> int | None:
    fitting = [
        axis
        for axis, size in enumerate(tensor.shape)
        if axis != taken and size and size % mesh.data == 0
    ]
    return fitting[0] if fitting else None


def _matching(pattern: str, names: Iterable[str], verb: str) -> list[str]:
    """Return the `names` that match a shell pattern. Raises `UserError` if there are none."""
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise UserError(
            f"the plan {verb} {pattern!r}, which matches nothing. Nearest: "
            f"{_nearest(pattern, names)}."
        )
    return matched


def _check_shared(what: str, size: int, mesh: Mesh) -> None:
    if size % mesh.tensor:
        divisors = [n for n in range(1, size + 1) if size % n == 0][:_SHOWN_NAMES]
        raise UserError(
            f"{what} is {size}, which cannot be split over {mesh.tensor} tensor-parallel ranks. "
            f"train.dist.tensor_parallel_size must divide it: {', '.join(map(str, divisors))}."
        )


def _nearest(pattern: str, names: Iterable[str]) -> str:
    known = [name for name in names if name]
    near = (
        difflib.get_close_matches(pattern, known, n=_SHOWN_NAMES, cutoff=0.3)
        or known[:_SHOWN_NAMES]
    )
    return ", ".join(near)
