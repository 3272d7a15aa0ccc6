"""eager = graph = a plain loop = the full batch, with unequal token counts per micro-batch."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy

ITERATIONS = 20


def plain_loop(model, data, optimizer, schedule, max_norm):
    """What a careful user would write by hand, on the full batch."""
    losses = []
    for i, batch in enumerate(data):
        for group, base in zip(optimizer.param_groups, (0.01, 0.005)):
            group["lr"] = base * schedule(i)
        loss = model(flow.from_numpy(batch["x"]), flow.from_numpy(batch["y"]))["losses"]["tag"]
        loss.backward()
        flow.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Schedule:
    """A schedule no OneFlow graph could compile: any function of the iteration."""

    def __init__(self, optimizer, function):
        self.optimizer, self.function, self.last_step = optimizer, function, 0
        self.bases = [group["lr"] for group in optimizer.param_groups]
        self._apply()

    def _apply(self):
        for group, base in zip(self.optimizer.param_groups, self.bases):
            group["lr"] = base * self.function(self.last_step)

    def step(self):
        self.last_step += 1
        self._apply()


def schedule(i):
    return 0.5 + 0.5 * np.cos(i / 5) if i % 7 else 1.3


def run(mode, optimizer_name, accumulation, data, max_norm=0.2):
    flow.manual_seed(0)
    model = toy.Tagger()
    optimizer = toy.optimizer_of(optimizer_name, model)
    if mode == "plain":
        return plain_loop(model, data, optimizer, schedule, max_norm), model
    micro = [part for batch in data for part in toy.split(batch, accumulation)]
    trainer = toy.trainer_of(
        mode,
        model,
        micro,
        optimizer,
        lr_scheduler=Schedule(optimizer, schedule),
        num_accumulation_steps=accumulation,
        max_grad_norm=max_norm,
    )
    losses = toy.record_losses(trainer)
    trainer.train(0, len(data))
    return losses, model


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
def test_both_modes_equal_a_plain_loop_over_full_batches(mode, optimizer_name, accumulation):
    data = toy.batches(ITERATIONS, size=16, ignored=0.4)
    expected, plain = run("plain", optimizer_name, 1, data)
    losses, model = run(mode, optimizer_name, accumulation, data)
    # float32 rounding only: sums run in another order when the batch is cut into micro-batches
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        np.testing.assert_allclose(q.numpy(), p.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_each_mode_is_bitwise_equal_to_itself(mode):
    data = toy.batches(8, size=16, ignored=0.4)
    (first, a), (second, b) = (run(mode, "adamw", 2, data) for _ in range(2))
    assert first == second
    for p, q in zip(a.parameters(), b.parameters()):
        assert np.array_equal(p.numpy(), q.numpy())


def test_averaging_micro_batch_means_would_be_noticed():
    """Negative control: the usual mean of micro-batch means is another loss when token counts differ."""
    data = toy.batches(1, size=16, ignored=0.4)
    flow.manual_seed(0)
    model = toy.Tagger()
    means = [
        model(flow.from_numpy(part["x"]), flow.from_numpy(part["y"]))["losses"]["tag"].item()
        for part in toy.split(data[0], 4)
    ]
    full = model(flow.from_numpy(data[0]["x"]), flow.from_numpy(data[0]["y"]))["losses"]["tag"].item()
    assert abs(np.mean(means) - full) > 1e-3 * full
