"""The planner's arithmetic by hand, its memory against what ranks really hold, and its choice."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import jobs
import oneflow as flow
import pytest
from oneflow import nn

from libai.engine import GraphTrainer
from libai.engine.setup.shape_only import build_shape_only, trace_forward
from libai.models import GPT, AlexNet, ResNet
from libai.parallel import Mesh, ParallelPlan
from libai.parallel.planner.activations import TracedOp, stage_costs
from libai.parallel.planner.candidates import Batch, Links, Traffic, Workload, meshes_of, propose, ring
from libai.utils.errors import UserError
from libai.utils.sizes import format_bytes, parse_bytes

GIB = 2**30


def make_gpt() -> GPT:
    return GPT(64, 16, hidden_size=32, num_layers=4, num_heads=4)


def ids(micro: int) -> dict[str, flow.Tensor]:
    return {name: flow.ones(micro, 16, dtype=flow.int64) for name in ("input_ids", "labels")}


@functools.cache
def traced(micro: int) -> list[TracedOp]:
    return trace_forward(make_gpt(), ids(micro))


def work_for(model: nn.Module, mode: str = "eager", micro: int = 2, accumulation: int = 1, **options) -> Workload:
    states = dict.fromkeys(dict(model.named_parameters()), 2)
    return Workload(
        model,
        ParallelPlan.of(model),
        states,
        lambda data: Batch(micro, accumulation),
        traced,
        mode,
        **options,
    )


def proposal(work: Workload, mesh: tuple[int, int, int], zero_stage: int = 0, recomputes: bool = False):
    (one,) = propose(work, [Mesh(*mesh)], [zero_stage], [recomputes]).candidates
    return one


# ------------------------------------------------------------------------------------------------ arithmetic


def test_one_rank_holds_everything_and_sends_nothing():
    model = make_gpt()
    weights = sum(p.numel() * 4 for p in model.parameters())
    one = proposal(work_for(model), (1, 1, 1))
    assert (one.memory.weights, one.memory.gradients, one.memory.optimizer) == (weights, weights, 2 * weights)
    assert one.traffic.total == 0 and one.bubble == 0
    assert one.memory.buffers == 4 * 16 * 16 * 4  # a causal mask in each block
    assert one.memory.activations > 0


def test_data_parallel_ranks_all_reduce_the_gradients_by_a_ring():
    model = make_gpt()
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert proposal(work_for(model), (4, 1, 1)).traffic.total == 2 * 3 * weights // 4
    per_micro_batch = work_for(model, accumulation=3, reduces_once=False)
    assert proposal(per_micro_batch, (2, 1, 1)).traffic.data == 3 * weights
    assert proposal(replace(per_micro_batch, mode="graph"), (2, 1, 1)).traffic.data == weights


def test_tensor_parallel_blocks_all_reduce_twice_forward_and_twice_backward():
    """Megatron-LM, section 3: two all-reduces of (batch, length, hidden) per block in each direction."""
    one = proposal(work_for(make_gpt(), accumulation=2), (1, 2, 1))
    activation = 2 * 16 * 32 * 4
    assert one.traffic.tensor == ring(2) * 4 * (2 + 2) * activation * 2
    assert one.traffic.total == one.traffic.tensor
    recomputing = proposal(work_for(make_gpt(), accumulation=2), (1, 2, 1), recomputes=True)
    assert recomputing.traffic.tensor == ring(2) * 4 * (2 + 2 + 2) * activation * 2


def test_pipeline_stages_send_activations_on_and_gradients_back():
    """The head shares the embedding's weight on the first stage: each stage of two sends one and receives one."""
    one = proposal(work_for(make_gpt(), "graph", accumulation=4), (1, 1, 2))
    assert one.traffic.pipeline == (1 + 1) * 2 * 16 * 32 * 4 * 4
    assert one.traffic.data == one.traffic.tensor == 0


def test_idle_time_of_a_pipeline():
    assert proposal(work_for(make_gpt(), "graph", accumulation=6), (1, 1, 2)).bubble == pytest.approx(1 / 7)
    assert proposal(work_for(make_gpt(), "eager", accumulation=6), (1, 1, 2)).bubble == pytest.approx(1 / 2)


def test_zero_shards_state_then_gradients_then_weights():
    model = make_gpt()
    none, one, two, three = (proposal(work_for(model), (2, 1, 1), stage).memory for stage in range(4))
    assert one.optimizer * 2 == none.optimizer and one.gradients == none.gradients
    assert two.gradients * 2 == none.gradients and two.weights == none.weights
    assert three.weights * 2 == none.weights
    weights = none.weights
    sent = [proposal(work_for(model), (2, 1, 1), stage).traffic.data for stage in range(4)]
    assert sent == [weights, weights, weights, 3 * weights // 2]


def test_an_axis_that_data_ranks_do_not_divide_is_not_sharded():
    model = nn.Linear(5, 7, bias=False)
    work = Workload(model, ParallelPlan(), {"weight": 1}, lambda data: Batch(1, 1), lambda micro: [])
    assert proposal(work, (2, 1, 1), 1).memory.optimizer == 5 * 7 * 4
    assert proposal(work, (5, 1, 1), 1).memory.optimizer == 7 * 4


def test_a_copy_for_undoing_updates_counts_weights_and_state():
    plain, kept = (proposal(work_for(make_gpt(), keeps_copy=keeps), (1, 1, 1)).memory for keeps in (False, True))
    assert kept.copy == plain.weights + plain.optimizer + plain.buffers
    assert kept.total == plain.total + kept.copy


def test_frozen_parameters_need_no_gradient_and_no_state():
    model = make_gpt()
    work = replace(work_for(model), states={"norm.weight": 2})
    memory = proposal(work, (1, 1, 1)).memory
    assert (memory.gradients, memory.optimizer) == (32 * 4, 2 * 32 * 4)


def test_recomputation_and_more_ranks_need_less_activation_memory():
    work = work_for(make_gpt(), micro=8)
    whole = proposal(work, (1, 1, 1)).memory.activations
    assert proposal(work, (1, 1, 1), recomputes=True).memory.activations < 0.6 * whole
    assert proposal(work, (1, 2, 1)).memory.activations < 0.8 * whole
    assert proposal(work, (1, 1, 2)).memory.activations < 0.8 * whole
    in_flight = replace(work, mode="graph", batch_for=lambda data: Batch(8, 2))
    assert proposal(in_flight, (1, 1, 2)).memory.activations > proposal(work, (1, 1, 2)).memory.activations


def test_a_compiled_step_on_cpu_keeps_the_result_of_every_operation():
    model = make_gpt()
    trainer = GraphTrainer(model, [ids(8)], flow.optim.AdamW(model.parameters()), device="cpu")
    trainer.prepare()
    work = work_for(make_gpt(), mode="graph", micro=8)
    on_cpu, on_cuda = (propose(work, [Mesh(1, 1, 1, device)]).candidates[0].memory for device in ("cpu", "cuda"))
    assert 0.7 < on_cpu.activations / trainer.graph.num_bytes < 1.3
    assert on_cuda.activations < 0.5 * on_cpu.activations
    (again,) = propose(work, [Mesh(1, 1, 1, "cpu")], recomputation=[True]).candidates
    assert again.memory.activations > on_cpu.activations


def test_a_pure_table_of_meshes():
    assert [(m.data, m.tensor, m.pipeline) for m in meshes_of(4, "cpu", pipeline=1)] == [
        (4, 1, 1),
        (2, 2, 1),
        (1, 4, 1),
    ]
    assert all(m.size == 12 for m in meshes_of(12, "cpu")) and len(list(meshes_of(12, "cpu"))) == 18


# ---------------------------------------------------------------------------------------------------- choice


def test_a_model_that_fits_trains_data_parallel():
    chosen = propose(work_for(make_gpt(), accumulation=8), meshes_of(4, "cpu")).choose(GIB)
    assert (chosen.mesh.data, chosen.mesh.tensor, chosen.mesh.pipeline) == (4, 1, 1)


def test_a_model_that_does_not_fit_on_one_rank_is_shared():
    proposals = propose(work_for(make_gpt()), meshes_of(4, "cpu"))
    whole = next(p for p in proposals.candidates if p.mesh.data == 4)
    chosen = proposals.choose(whole.memory.total - 1)
    assert chosen.mesh.data < 4
    assert chosen.memory.total < whole.memory.total * 0.9


def test_what_the_plan_or_the_batch_forbids_is_kept_with_its_reason():
    def batch_for(data: int) -> Batch:
        if data == 3:
            raise UserError("30 samples do not divide")
        return Batch(1, 1)

    work = replace(work_for(make_gpt()), batch_for=batch_for)
    reasons = propose(work, meshes_of(3, "cpu")).ruled_out
    assert reasons[Mesh(3, 1, 1)] == "30 samples do not divide"
    assert "cannot be shared by 3 tensor-parallel ranks" in reasons[Mesh(1, 3, 1)]
    stages = propose(work, meshes_of(8, "cpu", tensor=1, data=1)).ruled_out
    assert "every stage needs one" in stages[Mesh(1, 1, 8)]


def test_when_nothing_fits_the_error_names_the_smallest_need_and_what_helps():
    proposals = propose(work_for(make_gpt(), keeps_copy=True), meshes_of(2, "cpu"))
    least = min(proposals.candidates, key=lambda p: p.memory.total)
    with pytest.raises(UserError) as caught:
        proposals.choose(1024)
    text = str(caught.value)
    assert re.match("nothing fits into 1 KiB per rank, of which 92[12] B", text)
    assert f"The smallest need on 2 rank(s) is {format_bytes(least.memory.total)}, by {least.describe()}" in text
    for help_ in ("more ranks", "train.activation_checkpoint", "a micro-batch below 2", "replay_non_finite=false"):
        assert help_ in text


def test_when_no_mesh_is_possible_every_reason_is_listed():
    with pytest.raises(UserError, match="no mesh can be laid out.*\n1 x 1 x 8: .*every stage needs one"):
        propose(work_for(make_gpt()), [Mesh(1, 1, 8)]).choose(GIB)


def test_a_slow_link_between_machines_is_kept_for_data_parallel_ranks():
    traffic = Traffic(data=100, tensor=1000, pipeline=0)
    links = Links(within=1000, between=10, ranks_per_machine=4)
    assert links.seconds(traffic, Mesh(4, 4, 1)) == pytest.approx(1 + 10)
    assert links.seconds(traffic, Mesh(2, 8, 1)) == pytest.approx(100 + 10)


# ---------------------------------------------------------------------------------------------- shape-only models


def test_a_shape_only_model_has_names_and_shapes_and_no_memory():
    before = jobs_rss()
    model = build_shape_only(lambda: GPT(50304, 8, hidden_size=8192, num_layers=8, num_heads=8))
    assert sum(p.numel() for p in model.parameters()) > 6.5e9  # 26 GB
    assert jobs_rss() - before < 300 * 2**20
    small = build_shape_only(make_gpt)
    real = make_gpt()
    assert [(n, p.shape, p.dtype) for n, p in small.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in real.named_parameters()
    ]
    assert float(real.token_embedding.weight.abs().sum()) > 0  # what is built afterwards has values again
    assert float(nn.Linear(4, 4).weight.abs().sum()) > 0


def jobs_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: ResNet(width=8), (2, 3, 32, 32)), (lambda: AlexNet(width=8), (2, 3, 32, 32))]
)
def test_other_models_are_traced_too(make, shape):
    model = build_shape_only(make)
    ops = trace_forward(model, {"images": flow.zeros(*shape), "labels": flow.zeros(shape[0], dtype=flow.int64)})
    (cost,) = stage_costs(ops, ParallelPlan.of(model).arrange(model, Mesh()))
    assert cost.kept > shape[0] * 8 * 32 * 32 * 4
    assert cost.sent == cost.received == cost.reduced_forward == 0


@pytest.mark.parametrize(("text", "size"), [("40GiB", 40 * GIB), ("24GB", 24 * 10**9), ("12", 12), ("1.5 kib", 1536)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1GiB", "0", "1e3GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="is no size in bytes. Write a number above 0 with a unit"):
        parse_bytes(text, "--device-memory")


# ----------------------------------------------------------------------------- against what ranks really hold


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [2, 4])
def test_weights_and_state_on_every_rank_are_exactly_the_estimate(world, tmp_path):
    script = Path(__file__).parent / "memory_ranks.py"
    jobs.run_ranks(script, world, tmp_path / "rows.json", cwd=tmp_path, timeout=300)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == (6 if world == 2 else 8)
    for row in rows:
        for held in row["ranks"]:
            assert all(real == estimate for real, estimate in held.values()), row
    shared = [row for row in rows if row["mesh"][0] < world]
    whole = next(row for row in rows if row["mesh"][0] == world)["ranks"][0]["weights"][0]
    assert all(held["weights"][0] < whole for row in shared for held in row["ranks"])  # the meshes do differ
