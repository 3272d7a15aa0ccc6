"""How many bytes of activations a forward makes, and which of them travel between ranks, on a given mesh.

An estimate from the operations of one traced forward; no tensor is touched. What it assumes:

* The backward pass keeps what an operation needs for its gradient: its output (`_KEEPS_OUTPUT`), nothing (`_LINEAR`),
  and for all others the inputs. What is made from weights alone is not counted. docs/distributed.md has the error.
* Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): behind a weight split on its
  outputs activations are split, until a weight split on its inputs makes full tensors of them by an all-reduce; in the
  backward pass the gradient of what entered the first weight is all-reduced.
* Recomputation keeps each block's inputs and one block's activations at a time (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libai.parallel.plan import ShardingPlan

#: operations whose output is the input under another shape
_VIEWS = frozenset({"reshape", "flatten", "expand_dims", "squeeze", "identity"})
#: operations whose gradient needs neither inputs nor outputs, but shapes at most
_LINEAR = frozenset(
    {"add_n", "broadcast_add", "broadcast_sub", "bias_add", "scalar_add", "scalar_mul", "transpose", "concat", "split"}
    | {"narrow", "slice", "cast", "reduce_sum", "broadcast_like", "gather", "constant"}
)
#: operations whose gradient needs the output and not the input
_KEEPS_OUTPUT = frozenset({"softmax", "log_softmax", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt"})


@dataclass(frozen=True)
class TracedOp:
    """One operation: its kind, the module that ran it (for a `"variable"` its own name), the names of its inputs, and
    the bytes of each output."""

    kind: str
    module: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, int]


@dataclass
class StageCost:
    """Bytes on each rank of a pipeline stage, for one micro-batch.

    Attributes:
        made: what all operations of the forward pass give.
        kept: activations that the backward pass needs.
        kept_with_recomputation: the same when blocks recompute theirs.
        reduced_forward, reduced_backward: what tensor-parallel ranks all-reduce.
        reduced_again: what they all-reduce once more when blocks recompute their activations.
        sent, received: what goes to and comes from other stages in the forward pass.
    """

    made: int = 0
    kept: int = 0
    kept_with_recomputation: int = 0
    reduced_forward: int = 0
    reduced_backward: int = 0
    reduced_again: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class _Made:
    """Who made a tensor: its stage, its block (None outside of the blocks), its bytes per rank."""

    stage: int
    block: str | None
    num_bytes: int


def stage_costs(ops: Sequence[TracedOp], sharding: ShardingPlan) -> list[StageCost]:
    """The cost of one forward and backward of `ops` for each pipeline stage of `sharding`."""
    tensor = sharding.mesh.tensor
    costs = [StageCost() for _ in range(sharding.mesh.pipeline)]
    blocks = set(sharding.block_names)
    depth = (sharding.plan.blocks or "").count(".") + 2
    stage_of_block = {name: sharding.stage_of_block(i) for i, name in enumerate(sharding.block_names)}
    kept_by_block = dict.fromkeys(sharding.block_names, 0)
    entering: dict[tuple[str, str], _Made] = {}
    axis_of: dict[str, int | None] = {}  # of weights, and of what is made from weights alone
    split: set[str] = set()
    reduced_in_backward: set[str] = set()
    made: dict[str, _Made] = {}
    kept = _kept(ops)
    for op in ops:
        if op.kind == "variable":
            layout = sharding.tensors.get(op.module)
            axis_of.update(dict.fromkeys(op.outputs, layout.axis if layout else None))
            continue
        weights = [axis_of[name] for name in op.inputs if name in axis_of]
        data = [name for name in op.inputs if name in made]
        if weights and len(weights) == len(op.inputs):
            axis_of.update(dict.fromkeys(op.outputs, weights[0]))
            continue
        prefix = ".".join(op.module.split(".")[:depth])
        block = prefix if prefix in blocks else None
        stage = _stage_of(op, block, stage_of_block, [made[name] for name in data], sharding)
        cost = costs[stage]
        # an embedding split on its rows looks up a part of the ids, as a weight split on its inputs sums up a part
        summed_axis, kept_axis = (0, 1) if op.kind == "gather" else (1, 0)
        is_sum = tensor > 1 and summed_axis in weights
        is_split = not is_sum and tensor > 1 and (kept_axis in weights or any(name in split for name in data))
        num_bytes = sum(op.outputs.values()) // (tensor if is_split else 1)
        if is_sum:
            cost.reduced_forward += num_bytes
            cost.reduced_again += num_bytes if block else 0
        if is_split and kept_axis in weights:
            for name in data:
                if name not in split and name not in reduced_in_backward:
                    reduced_in_backward.add(name)
                    cost.reduced_backward += made[name].num_bytes
        for name in data:
            if block != made[name].block or stage != made[name].stage:
                entering.setdefault((block or f"stage {stage}", name), _Made(stage, block, made[name].num_bytes))
        for name, size in op.outputs.items():
            made[name] = _Made(stage, block, size // (tensor if is_split else 1))
            if is_split:
                split.add(name)
        cost.made += num_bytes
        num_kept = sum(made[name].num_bytes for name in op.outputs if name in kept)
        cost.kept += num_kept
        if block:
            kept_by_block[block] += num_kept
        else:
            cost.kept_with_recomputation += num_kept
    for (_, name), reader in entering.items():
        is_moved = made[name].stage != reader.stage
        if is_moved:
            costs[made[name].stage].sent += reader.num_bytes
            costs[reader.stage].received += reader.num_bytes
        if reader.block and (is_moved or made[name].block):  # else its maker has kept it
            costs[reader.stage].kept_with_recomputation += reader.num_bytes
    for stage, cost in enumerate(costs):
        own = [kept_by_block[block] for block, where in stage_of_block.items() if where == stage]
        cost.kept_with_recomputation += max(own, default=0)
    return costs


def kept_activations(ops: Sequence[TracedOp]) -> dict[str, int]:
    """The bytes that the backward pass of one rank needs, by the module that makes them."""
    kept, found = _kept(ops), dict[str, int]()
    from_weights: set[str] = set()
    for op in ops:
        if op.kind == "variable" or (op.inputs and from_weights.issuperset(op.inputs)):
            from_weights.update(op.outputs)
            continue
        found[op.module] = found.get(op.module, 0) + sum(size for name, size in op.outputs.items() if name in kept)
    return found


def _kept(ops: Sequence[TracedOp]) -> set[str]:
    """The names of the tensors that the backward pass needs; of a view, the tensor that it shows."""
    shown = {name: op.inputs[0] for op in ops if op.kind in _VIEWS and op.inputs for name in op.outputs}

    def source(name: str) -> str:
        while name in shown:
            name = shown[name]
        return name

    kept: set[str] = set()
    for op in ops:
        if op.kind in _KEEPS_OUTPUT:
            kept.update(op.outputs)
        elif op.kind not in _LINEAR | _VIEWS:
            kept.update(source(name) for name in op.inputs)
            kept.update(list(op.outputs)[1:])  # a second output is there for the gradient, as a norm's statistics
    return kept


def _stage_of(
    op: TracedOp,
    block: str | None,
    stage_of_block: Mapping[str, int],
    inputs: Sequence[_Made],
    sharding: ShardingPlan,
) -> int:
    if block is not None:
        return stage_of_block[block]
    stage = sharding.stage_of_module(op.module)
    if stage is not None:
        return stage
    # an operation of the model itself: where its inputs are, but what follows the blocks is on the stage behind them
    stages = [sharding.tail if given.block else given.stage for given in inputs]
    return max(stages, default=0)
