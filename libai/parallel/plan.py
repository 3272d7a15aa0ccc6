"""A parallel plan: how one model's parameters and blocks are laid on any mesh, as data and not as code.

A model may carry a plan as its attribute `plan`, or a config gives one (`train.dist.plan`). `libai.parallel.layout`
applies it; this file moves no tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers.lora import ADAPTER
from libai.parallel.mesh import Mesh
from libai.parallel.stages import balance
from libai.utils.errors import UserError
from libai.utils.tables import format_table

_SHOWN_NAMES = 12


@dataclass(frozen=True)
class TensorLayout:
    """Where one parameter or buffer lives: its pipeline stage, the axis that tensor-parallel ranks share and the one
    that data-parallel ranks share (None where each holds it all). `num_bytes` is the full tensor's size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    stage: int
    axis: int | None
    is_parameter: bool
    data_axis: int | None = None

    def bytes_per_rank(self, mesh: Mesh) -> int:
        """Bytes on each rank that holds a part of it."""
        parts = mesh.tensor if self.axis is not None else 1
        return self.num_bytes // (parts * (mesh.data if self.data_axis is not None else 1))


@dataclass(frozen=True)
class ShardingPlan:
    """A plan worked out for one model and one mesh.

    `tensors`: every parameter and buffer by name. `blocks_per_stage`: how many blocks each pipeline stage runs.
    `tail`: the stage of what comes behind the blocks. `block_names`: the blocks in order.
    """

    mesh: Mesh
    tensors: Mapping[str, TensorLayout]
    block_names: Sequence[str]
    blocks_per_stage: Sequence[int]
    tail: int
    plan: ParallelPlan

    @property
    def shares_parameters(self) -> bool:
        """Whether data-parallel ranks hold parts of some parameters instead of all of each (ZeRO)."""
        return any(t.data_axis is not None for t in self.tensors.values())

    def stage_of_block(self, number: int) -> int:
        """The stage that runs the block with this number."""
        for stage, count in enumerate(self.blocks_per_stage):
            if number < count:
                return stage
            number -= count
        raise IndexError(number)

    def stage_of_module(self, name: str) -> int | None:
        """The stage that runs the module `name`; None for one that spans stages, such as the list of blocks."""
        if not name or name == self.plan.blocks or f"{self.plan.blocks}.".startswith(f"{name}."):
            return None
        for number, block in enumerate(self.block_names):
            if name == block or name.startswith(f"{block}."):
                return self.stage_of_block(number)
        return self.tail if self.plan.is_last(name) else 0

    def stage_of_input(self, name: str) -> int:
        """The stage that reads the argument `name` of the model's forward."""
        return self.tail if self.plan.is_last(name) else 0

    def parameter_bytes(self, stage: int) -> int:
        """Bytes of parameters on each rank of a stage."""
        return sum(t.bytes_per_rank(self.mesh) for t in self.tensors.values() if t.stage == stage and t.is_parameter)


@dataclass(frozen=True)
class ParallelPlan:
    """How to spread one kind of model.

    Args:
        split: pattern of parameter (or buffer) names -> axis that tensor-parallel ranks share. Column-parallel linear
            layers split the outputs (axis 0 of weight and bias), row-parallel ones the inputs (axis 1 of the weight
            alone). What no pattern matches is a full tensor on every rank.
        blocks: name of the `ModuleList` (or `Sequential`) that pipeline stages and activation checkpointing cut.
        last: patterns of the parameters and of the forward arguments (`labels`) that belong to the last pipeline
            stage. Without any, what follows the blocks runs on the first stage again, which is right for every model,
            also when its head shares a weight with its embedding.
        pin: pattern of module names -> layout of their output over the tensor-parallel ranks: "full", or an axis.
        divisible: patterns of integer attributes (`blocks.*.attention.num_heads`) that the number of tensor-parallel
            ranks must divide.

    Patterns are shell patterns over dotted names: `blocks.*.mlp.up.weight`.
    """

    split: Mapping[str, int] = field(default_factory=dict)
    blocks: str | None = None
    last: Sequence[str] = ()
    pin: Mapping[str, str | int] = field(default_factory=dict)
    divisible: Sequence[str] = ()

    @classmethod
    def read(cls, description: Any, source: str = "the plan") -> ParallelPlan:
        """A plan from a mapping with the keys above, or from a plan. Raises `UserError` for anything else."""
        if isinstance(description, ParallelPlan):
            return description
        if not isinstance(description, Mapping):
            raise UserError(
                f"{source} is a {type(description).__name__}, not a mapping. Write "
                '{"split": {"blocks.*.up.weight": 0}, "blocks": "blocks"}.'
            )
        known = [f.name for f in fields(cls)]
        for key in description:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
                raise UserError(f"{source} has no key {key!r}. {hint}")
        return cls(**{str(key): value for key, value in description.items() if value is not None})

    @classmethod
    def of(cls, model: nn.Module, description: Any = None) -> ParallelPlan:
        """`description` as a plan when given, else the model's attribute `plan`, else an empty one."""
        if description is not None:
            return cls.read(description, "train.dist.plan")
        return cls.read(getattr(model, "plan", None) or {}, f"{type(model).__name__}.plan")

    def is_last(self, name: str) -> bool:
        """True when a pattern of `last` names `name`, all that is in it (`head.*`), or a module that it is in."""
        return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") or p == f"{name}.*" for p in self.last)

    def arrange(
        self,
        model: nn.Module,
        mesh: Mesh,
        shares_parameters: bool = False,
    ) -> ShardingPlan:
        """Work the plan out for `model` (local or global tensors) on `mesh`. Moves nothing.

        Args:
            shares_parameters: data-parallel ranks share each parameter on the first axis that their number divides
                and that the plan does not split (ZeRO); one without such an axis is not split.

        Raises `UserError` for a pattern that matches nothing, an axis that does not divide, and more stages than
        blocks; the text lists what would fit.
        """
        named = {name: (t, isinstance(t, nn.Parameter)) for name, t in named_tensors(model)}
        axes = self._axes(named, mesh)
        self._check_patterns(model, mesh)
        names = self.block_names(model) if self.blocks or mesh.pipeline > 1 else []
        tail = mesh.pipeline - 1 if self.last else 0
        counts = self._blocks_per_stage(model, names, mesh, tail)
        starts = [stage for stage, count in enumerate(counts) for _ in range(count)]
        stage_of_block = dict(zip(names, starts))
        tensors = {}
        for name, (tensor, is_parameter) in named.items():
            block = next((b for b in names if name.startswith(f"{b}.")), None)
            stage = stage_of_block[block] if block else (tail if self.is_last(name) else 0)
            tensors[name] = TensorLayout(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("oneflow."),
                tensor.numel() * tensor.element_size(),
                stage,
                axes.get(name),
                is_parameter,
                _data_axis(tensor, axes.get(name), mesh) if shares_parameters and is_parameter else None,
            )
        return ShardingPlan(mesh, tensors, names, counts, tail, self)

    def describe(self, model: nn.Module, mesh: Mesh, **options: Any) -> str:
        """A table: parameter, shape, stage, layout, bytes per rank. `options` as for `arrange`."""
        sharding = self.arrange(model, mesh, **options)
        rows = [("parameter", "shape", "stage", "layout", "bytes per rank")]
        for t in sharding.tensors.values():
            if t.is_parameter:
                cuts = [(t.axis, mesh.tensor), (t.data_axis, mesh.data)]
                layout = ", ".join(f"axis {a} in {n}" for a, n in cuts if a is not None and n > 1) or "full"
                shape = " x ".join(map(str, t.shape)) or "scalar"
                rows.append((t.name, shape, str(t.stage), layout, f"{t.bytes_per_rank(mesh):,}"))
        lines = [format_table(rows, right=[4])]
        for stage, count in enumerate(sharding.blocks_per_stage):
            what = f"stage {stage}, {count} blocks: " if mesh.pipeline > 1 else ""
            lines.append(f"{what}{sharding.parameter_bytes(stage):,} bytes of parameters per rank")
        return "\n".join([mesh.describe(), *lines])

    # ------------------------------------------------------------------ the parts of `arrange`

    def _axes(self, named: Mapping[str, tuple[Any, bool]], mesh: Mesh) -> dict[str, int]:
        """Name -> axis that is split on this mesh."""
        axes: dict[str, int] = {}
        for pattern, axis in self.split.items():
            matched = [name for name in named if fnmatchcase(name, pattern) and not ADAPTER.search(name)]
            if not matched:
                raise UserError(
                    f"the plan splits {pattern!r}, which matches no parameter. Parameters there are: "
                    f"{_nearest(pattern, named)}."
                )
            for name in matched:
                shape = tuple(named[name][0].shape)
                if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < len(shape):
                    raise UserError(
                        f"the plan splits {pattern!r} on axis {axis!r}, but {name} has shape {shape}: its axes are "
                        f"{', '.join(map(str, range(len(shape))))}."
                    )
                if shape[axis] % mesh.tensor:
                    raise UserError(
                        f"{name} has shape {shape}, and its axis {axis} of {shape[axis]} cannot be shared by "
                        f"{mesh.tensor} tensor-parallel ranks. train.dist.tensor_parallel_size must divide it: "
                        f"{', '.join(map(str, _divisors(shape[axis])))}."
                    )
                if mesh.tensor > 1:
                    axes[name] = axis
                    adapter = f"{name.removesuffix('weight')}{'lora_A' if axis else 'lora_B'}.weight"
                    if adapter in named:  # the matrix of the layer's LoRA adapter that has this axis
                        axes[adapter] = axis
        if mesh.tensor > 1 and not axes:
            raise UserError(
                f"train.dist.tensor_parallel_size={mesh.tensor}, but no plan says which parameters to split, so every "
                "rank would do the same work. Give the model class an attribute plan = {'split': {pattern: axis}}, or "
                "set train.dist.plan in the config."
            )
        return axes

    def _check_patterns(self, model: nn.Module, mesh: Mesh) -> None:
        modules = dict(model.named_modules())
        for pattern in self.pin:
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise UserError(
                    f"the plan pins the output of {pattern!r}, which matches no module. Modules there are: "
                    f"{_nearest(pattern, modules)}."
                )
        for pattern in self.divisible:
            owner, _, attribute = pattern.rpartition(".")
            found = {
                f"{name}.{attribute}": getattr(module, attribute, None)
                for name, module in modules.items()
                if fnmatchcase(name, owner)
            }
            if not found:
                raise UserError(f"the plan's `divisible` names {pattern!r}, but {owner!r} matches no module.")
            for name, value in found.items():
                if not isinstance(value, int):
                    raise UserError(f"the plan's `divisible` names {name}, which is no whole number but {value!r}.")
                if value % mesh.tensor:
                    raise UserError(
                        f"{name}={value} cannot be shared by {mesh.tensor} tensor-parallel ranks. "
                        f"train.dist.tensor_parallel_size must divide it: {', '.join(map(str, _divisors(value)))}."
                    )

    def block_names(self, model: nn.Module) -> list[str]:
        """The names of the blocks in order. Raises `UserError` when the plan names no list of blocks."""
        if self.blocks is None:
            raise UserError(
                "pipeline stages and activation checkpointing cut a model between its blocks, and no plan names the "
                f"list of blocks. Give {type(model).__name__} an attribute plan = {{'blocks': name}}, or set "
                f"train.dist.plan.blocks. Lists in this model: {_lists_in(model)}."
            )
        container = dict(model.named_modules()).get(self.blocks)
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            found = "there is none" if container is None else f"it is a {type(container).__name__}"
            raise UserError(
                f"the plan's blocks={self.blocks!r} must name a ModuleList or Sequential of the model; {found}. "
                f"Lists in this model: {_lists_in(model)}."
            )
        return [f"{self.blocks}.{name}" for name, _ in container.named_children()]

    def _blocks_per_stage(self, model: nn.Module, names: Sequence[str], mesh: Mesh, tail: int) -> list[int]:
        """Return how many blocks each stage runs so that the stages have about as many parameters."""
        if mesh.pipeline > 1 and mesh.pipeline > len(names):
            raise UserError(
                f"train.dist.pipeline_parallel_size={mesh.pipeline}, but {self.blocks} has {len(names)} block(s), and "
                f"every stage needs one. Use at most {len(names)} stages."
            )
        if mesh.pipeline == 1:
            return [len(names)]
        modules = dict(model.named_modules())
        costs = [float(sum(p.numel() for p in modules[name].parameters())) for name in names]
        outside = {
            name: p.numel()
            for name, p in model.named_parameters()
            if not any(name.startswith(f"{block}.") for block in names)
        }
        behind = float(sum(size for name, size in outside.items() if self.is_last(name)))
        before = float(sum(outside.values())) - behind
        return balance(costs, mesh.pipeline, before, behind, tail)


def named_tensors(model: nn.Module) -> list[tuple[str, flow.Tensor]]:
    """Every parameter, then every buffer of `model` by name; tied ones under their first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _data_axis(tensor: flow.Tensor, taken: int | None, mesh: Mesh) -> int | None:
    if mesh.data == 1:
        return None
    fitting = [axis for axis, size in enumerate(tensor.shape) if axis != taken and size and size % mesh.data == 0]
    return fitting[0] if fitting else None


def _nearest(pattern: str, names: Iterable[str]) -> str:
    names = [name for name in names if name]
    near = difflib.get_close_matches(pattern, names, n=_SHOWN_NAMES, cutoff=0.3) or names[:_SHOWN_NAMES]
    rest = len(names) - len(near)
    return ", ".join(near) + (f" and {rest} more" if rest > 0 else "")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0][:_SHOWN_NAMES]


def _lists_in(model: nn.Module) -> str:
    lists = [name for name, m in model.named_modules() if name and isinstance(m, nn.ModuleList | nn.Sequential)]
    return ", ".join(lists) or "none"
