"""Buffers that forward changes and module hooks train as in a plain loop, in both modes; other state is refused."""

from __future__ import annotations

import re

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import record_losses, trainer_of

from libai.engine.trainer.switching import switch_trainer
from libai.utils.errors import UserError

WAYS = {
    "copy_": lambda m, v: m.average.copy_(m.average * 0.9 + v),
    "add_": lambda m, v: m.average.add_(v),
    "slice": lambda m, v: m.average.__setitem__(slice(None), m.average * 0.8 + v),
    "assign": lambda m, v: setattr(m, "average", m.average * 0.9 + v),
    "data": lambda m, v: setattr(m.average, "data", m.average * 0.9 + v),
    "through detach": lambda m, v: m.average.detach().copy_(v),
}


class Averaging(nn.Module):
    """Normalizes by a moving average of its activations, kept in a submodule's buffer; counts its calls."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.body = nn.Linear(3, 3)
        self.register_buffer("average", flow.ones(3))
        self.register_buffer("count", flow.zeros(1, dtype=flow.int64), persistent=False)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        h = flow.tanh(self.body(x))
        WAYS[self.way](self, h.mean(0).detach())
        self.count += 1
        # a copy: the backward pass reads it, and an in-place change of what it reads is another gradient
        loss = (self.head(h - self.average.clone()) ** 2).mean() + 0.1 / (1.0 + self.count.to(flow.float32).sum())
        return {"losses": {"mse": loss}}


def data(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.RandomState(seed)
    return [{"x": rng.randn(4, 3).astype(np.float32)} for _ in range(count)]


def built(make):
    flow.manual_seed(0)
    return make()


def plain_loop(model, batches, accumulation: int = 1):
    """Twenty lines without libai: the losses of every iteration."""
    optimizer = flow.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for start in range(0, len(batches), accumulation):
        total = 0.0
        for batch in batches[start : start + accumulation]:
            loss = model(flow.from_numpy(batch["x"]))["losses"]["mse"] / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def trained(mode, model, batches, accumulation: int = 1, iterations: int | None = None, **options):
    trainer = trainer_of(
        mode,
        model,
        batches,
        flow.optim.AdamW(model.parameters(), lr=0.05),
        num_accumulation_steps=accumulation,
        **options,
    )
    losses = record_losses(trainer)
    trainer.train(0, iterations or len(batches) // accumulation)
    return losses, trainer


def assert_same_buffers(one, other):
    for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers()):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.e2e
@pytest.mark.parametrize(("way", "accumulation"), [*((way, 2) for way in WAYS), ("copy_", 1), ("assign", 1)])
def test_a_buffer_that_forward_changes_is_as_in_a_plain_loop(mode, way, accumulation):
    reference, model = built(lambda: Averaging(way)), built(lambda: Averaging(way))
    expected = plain_loop(reference, data(8), accumulation)
    losses, _ = trained(mode, model, data(8), accumulation)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_buffers(model, reference)
    assert int(model.count.numpy()[0]) == 8


def test_buffers_are_carried_over_switches(mode):
    other = {"eager": "graph", "graph": "eager"}[mode]
    reference, model = built(lambda: Averaging("assign")), built(lambda: Averaging("assign"))
    expected = plain_loop(reference, data(9))
    losses, trainer = trained(mode, model, data(9), iterations=3)
    for target in (other, mode):
        trainer = switch_trainer(trainer, target)
        trainer.train(trainer.iter, trainer.iter + 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_buffers(model, reference)


# ------------------------------------------------------------------------------------------------- hooks


class Hooked(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)
        if kind == "forward":
            self.a.register_forward_hook(lambda module, args, output: flow.tanh(output) * 2.0)
        elif kind == "weight_norm":
            nn.utils.weight_norm(self.a)
        elif kind == "closure":
            self.scale = nn.Parameter(flow.ones(4) * 2.0)
            self.a.register_forward_hook(lambda module, args, output: output * self.scale)
        elif kind in CARRIERS:
            self.scale = nn.Parameter(flow.ones(4) * 2.0)
            self.a.register_forward_hook(CARRIERS[kind](self))

    def forward(self, x):
        return {"losses": {"mse": (self.b(self.a(x)) - 1.0).pow(2).mean()}}


class Scales:
    """A callable object as a hook."""

    def __init__(self, model):
        self.model = model

    def __call__(self, module, args, output):
        return output * self.model.scale


def _in_a_closure(scale):
    return lambda module, args, output: output * scale


#: how a hook may hold a parameter, or a module that has it
CARRIERS = {
    "parameter": lambda model: _in_a_closure(model.scale),
    "object": Scales,
}
KINDS = ["forward", "weight_norm", "closure", *CARRIERS]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
def test_module_hooks_run_once_in_both_modes(mode, kind):
    reference, model = built(lambda: Hooked(kind)), built(lambda: Hooked(kind))
    expected = plain_loop(reference, data(10))
    losses, _ = trained(mode, model, data(10))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    without, _ = trained(mode, built(lambda: Hooked("none")), data(10))
    assert max(abs(np.subtract(without, losses))) > 1e-3  # the control: the hook is no formality


# ------------------------------------------------------------------------------------------------- refused

STEPS = [0]


class Remembers(nn.Module):
    """Keeps something in Python from call to call."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 1)
        self.calls, self.last, self.scale, self.mask = 0, flow.zeros(1), None, None
        if kind == "hook":
            counts = [0]
            self.layer.register_forward_hook(lambda m, a, o: counts.__setitem__(0, counts[0] + 1))

    def forward(self, x):
        loss = (self.layer(x) ** 2).mean()
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "tensor":
            self.last = self.last * 0.9 + loss.detach()
            loss = loss + self.last.sum()
        elif self.kind == "first batch":
            if self.scale is None:
                self.scale = x.std().detach()
            loss = loss * self.scale
        elif self.kind == "global":
            STEPS[0] += 1
        elif self.kind == "numpy":
            loss = loss * float(np.random.rand())
        elif self.kind == "parameter":
            self.layer.weight.data.clamp_(-0.01, 0.01)
        elif self.kind == "written before it is read":
            self.last = x.mean().detach()
            loss = loss + self.last
        elif self.kind == "cache":
            if self.mask is None:
                self.mask = flow.ones(3) * 2.0
            loss = (self.layer(x * self.mask) ** 2).mean()
        return {"losses": {"mse": loss}}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("counter", "self.calls += 1"),
        ("tensor", "self.last = "),
        ("first batch", "self.scale = "),
        ("global", "the global STEPS"),
        ("numpy", "NumPy's random numbers"),
        ("parameter", "layer.weight"),
        ("hook", "the variable counts"),
    ],
)
def test_state_that_a_graph_cannot_keep_is_refused_by_name_before_the_first_update(kind, named):
    model = Remembers(kind)
    before, steps = model.layer.weight.numpy().copy(), STEPS[0]
    with pytest.raises(UserError) as raised:
        trained("graph", model, data(2))
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (model.layer.weight.numpy() == before).all()
    assert STEPS[0] == steps
    if kind == "parameter":
        with pytest.raises(UserError, match=re.escape(str(raised.value))):
            trained("eager", model, data(2))
        return
    losses, trainer = trained("eager", Remembers(kind), data(2))
    assert len(losses) == 2


@pytest.mark.parametrize("kind", ["written before it is read", "cache", "none"])
def test_state_that_makes_no_difference_is_not_refused(mode, kind):
    expected = plain_loop(built(lambda: Remembers(kind)), data(6))
    losses, _ = trained(mode, built(lambda: Remembers(kind)), data(6))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 3)
        self.register_buffer("kept", flow.zeros(3))

    def forward(self, x):
        h = self.layer(x)
        if self.kind == "gradient":
            self.kept = self.kept * 0.9 + h.mean(0)
        elif self.kind == "shape":
            self.kept = flow.cat([self.kept, h.mean(0).detach()])
        elif self.kind == "dtype":
            self.kept = self.kept.to(flow.float64)
        elif self.kind == "view":
            self.kept.view(3, 1).add_(h.mean(0).detach().view(3, 1))
        return {"losses": {"mse": (h**2).mean()}}


@pytest.mark.parametrize(
    ("kind", "named"), [("gradient", ".detach()"), ("shape", "(6,)"), ("dtype", "float64"), ("view", "through a view")]
)
def test_buffers_that_cannot_be_kept_are_refused_by_name(mode, kind, named):
    if (mode, kind) == ("eager", "view"):
        trained(mode, Odd(kind), data(2))
        return
    with pytest.raises(UserError) as raised:
        trained(mode, Odd(kind), data(2))
    assert named in str(raised.value)
    assert "buffer kept (Odd, " in str(raised.value)
    assert "test_forward_state.py" in str(raised.value)
