"""The compiled step equals an eager one, group by group, and says what it is compiled for."""

from __future__ import annotations

import math

import numpy as np
import oneflow as flow
import pytest
import toy

from libai.engine.graph.graphs import TrainGraph
from libai.utils.errors import UserError


def make_trainer(mode, loader, groups=None, accumulation=1, optimizer=flow.optim.AdamW, **options):
    flow.manual_seed(0)
    model = toy.Classifier()
    built = optimizer(groups(model) if groups else model.parameters(), lr=0.01)
    return toy.trainer_of(mode, model, loader, built, num_accumulation_steps=accumulation, **options)


def two_groups(model, **second):
    matrices = [p for n, p in model.named_parameters() if "bias" not in n]
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, **second}]


def weights(trainer):
    return {name: p.numpy().copy() for name, p in trainer.model.named_parameters()}


def assert_same_weights(a, b, rtol=1e-5):
    for name, value in weights(a).items():
        np.testing.assert_allclose(weights(b)[name], value, rtol=rtol, atol=1e-7, err_msg=name)


def test_a_rate_changed_by_hand_takes_effect_in_a_compiled_graph():
    trainer = make_trainer("graph", toy.batches(4))
    trainer.train(0, 2)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    before = weights(trainer)
    trainer.train(2, 4)
    assert all(np.array_equal(value, weights(trainer)[name]) for name, value in before.items())
    trainer.optimizer.param_groups[0]["lr"] = 0.1
    trainer.train(4, 5)
    assert any(not np.array_equal(value, weights(trainer)[name]) for name, value in before.items())


def test_each_group_has_its_rate_and_its_weight_decay(mode):
    def groups(model):
        return two_groups(model, lr=0.0)

    trainer = make_trainer(mode, toy.batches(3), groups)
    before = weights(trainer)
    trainer.train(0, 3)
    for name, value in before.items():
        assert np.array_equal(value, weights(trainer)[name]) == ("bias" in name)


def test_groups_decay_alike_in_both_modes():
    eager, graph = (make_trainer(mode, toy.batches(8), two_groups) for mode in ("eager", "graph"))
    undecayed = make_trainer("graph", toy.batches(8))
    for trainer in (eager, graph, undecayed):
        trainer.train(0, 8)
    assert_same_weights(eager, graph)
    with pytest.raises(AssertionError):  # negative control: decay is large enough to be seen
        assert_same_weights(eager, undecayed)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_returned_norm_is_that_of_a_hand_written_step(mode, norm_type):
    data = toy.batches(2)
    trainer = make_trainer(mode, data, two_groups, accumulation=2, max_grad_norm=0.01, norm_type=norm_type)
    flow.manual_seed(0)
    model = toy.Classifier()
    for batch in data:
        (model(flow.from_numpy(batch["x"]), flow.from_numpy(batch["y"]))["losses"]["cls"] / 2).backward()
    expected = flow.nn.utils.clip_grad_norm_(list(model.parameters()), 0.01, norm_type).item()
    trainer.train(0, 1)
    assert trainer.fetch_metrics()["train/grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_no_norm_is_made_up_without_clipping(mode):
    trainer = make_trainer(mode, toy.batches(1))
    trainer.train(0, 1)
    assert "train/grad_norm" not in trainer.fetch_metrics()


@pytest.mark.parametrize("do_bias_correction", [True, False])
def test_bias_corrections_equal_the_eager_ones(do_bias_correction):
    def adam(parameters, lr):
        return flow.optim.Adam(parameters, lr=lr, betas=(0.8, 0.95), do_bias_correction=do_bias_correction)

    eager, graph = (make_trainer(mode, toy.batches(10), optimizer=adam) for mode in ("eager", "graph"))
    eager.train(0, 10)
    graph.train(0, 10)
    assert_same_weights(eager, graph)


def test_one_norm_of_several_kinds_of_updates_is_refused_where_ranks_hold_parts():
    def groups(model):
        return two_groups(model, amsgrad=True)

    trainer = make_trainer("graph", toy.batches(1), groups, max_grad_norm=0.1)
    trainer.forward_pass.layout.cuts_parameters = True
    with pytest.raises(UserError, match="max_norm cannot be honoured in graph mode for 2 kinds .*adam_conf amsgrad="):
        trainer.train(0, 1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_another_shape_gives_the_eager_update(accumulation):
    data = toy.batches(4) + toy.batches(1, size=5) + toy.batches(3, seed=1)
    eager, graph = (
        make_trainer(mode, data, accumulation=accumulation, max_grad_norm=0.1) for mode in ("eager", "graph")
    )
    expected, found = toy.record_losses(eager), toy.record_losses(graph)
    eager.train(0, 8 // accumulation)
    graph.train(0, 8 // accumulation)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_same_weights(eager, graph)


def test_gradients_from_before_do_not_freeze_the_graph():
    """A gradient that is not None at compile time keeps its parameter out of the update in OneFlow 0.9.0."""
    trainer = make_trainer("graph", toy.batches(4))
    batch = {name: flow.from_numpy(value) for name, value in toy.batches(1)[0].items()}
    trainer.model(**batch)["losses"]["cls"].backward()
    before = weights(trainer)
    trainer.train(0, 2)
    assert all(not np.array_equal(value, weights(trainer)[name]) for name, value in before.items())


def test_the_build_time_is_known():
    trainer = make_trainer("graph", toy.batches(1))
    assert trainer.graph is None
    trainer.train(0, 1)
    assert trainer.graph.build_seconds > 0


@pytest.mark.parametrize("amp, dtype", [("fp16", 2), ("bf16", 20)])
def test_amp_is_in_the_job_of_the_graph(amp, dtype):
    """Compiled for CUDA only, so only its configuration can be looked at here."""
    trainer = make_trainer("graph", toy.batches(1))
    graph = TrainGraph(trainer.model, trainer.optimizer, amp=amp)
    proto = graph.config.proto
    assert proto.enable_auto_mixed_precision
    plain = TrainGraph(trainer.model, trainer.optimizer)
    assert not plain.config.proto.enable_auto_mixed_precision
    assert (graph._grad_scaler is not None) == (amp == "fp16")  # bf16 has the exponents of float32


def names_of(trainer):
    return [op.name for op in trainer.graph._full_job_proto.net.op]


@pytest.mark.parametrize("optimizer", [flow.optim.SGD, flow.optim.AdamW])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_no_update_reads_is_not_in_the_job(optimizer, accumulation):
    trainer = make_trainer("graph", toy.batches(2 * accumulation), optimizer=optimizer, accumulation=accumulation)
    trainer.train(0, 2)
    assert not [name for name in names_of(trainer) if "TrainStep" in name or "Scheduler" in name or "factor" in name]
    assert trainer.optimizer_state.export()[1]["step"] == 2


def test_a_count_that_an_update_reads_stays_in_the_job():
    trainer = make_trainer("graph", toy.batches(2), optimizer=flow.optim.Adagrad)
    trainer.train(0, 2)
    kept = [name for name in names_of(trainer) if "TrainStep" in name]
    assert len(kept) == 4 and "System-Train-TrainStep-Assign" in kept


def test_a_step_is_launched_with_fresh_scalars_of_the_size_of_the_accumulation():
    trainer = make_trainer("graph", toy.batches(4), accumulation=2)
    trainer.train(0, 1)
    tensors = trainer._step_inputs.tensors
    assert sorted(tensors) == ["bias1_0_0", "bias2_0_0", "lr_0_0"]
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(2,)}
    assert tensors["bias1_0_0"].numpy().tolist() == pytest.approx([0.1, 0.1])
    rate, bias = tensors["lr_0_0"], tensors["bias1_0_0"]
    trainer.train(1, 2)
    assert tensors["lr_0_0"] is rate  # unchanged
    assert tensors["bias1_0_0"] is not bias and bias.numpy().tolist() == pytest.approx([0.1, 0.1])
