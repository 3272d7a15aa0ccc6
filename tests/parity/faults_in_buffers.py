"""Faults in buffers: ways to change a buffer before and after it is read."""

import functools

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn
from planting import FAULTS, WIDTH, Fault, Middle, Net, plant, with_a_norm

WAYS = {
    "copy_": lambda m, v: m.average.copy_(m.average * 0.9 + v),
    "add_": lambda m, v: m.average.add_(v),
    "lerp of parts": lambda m, v: m.average.mul_(0.9).add_(v * 0.1),
    "slice": lambda m, v: m.average.__setitem__(slice(None), m.average * 0.8 + v),
    "part": lambda m, v: m.average.__setitem__(slice(2, 4), v[2:4]),
    "fill_": lambda m, v: m.average.fill_(0.5),
    "assign": lambda m, v: setattr(m, "average", m.average * 0.9 + v),
    "assign in turn": lambda m, v: setattr(m, "average", flow.maximum(m.average, v)),
    "data": lambda m, v: setattr(m.average, "data", m.average * 0.9 + v),
    "through detach": lambda m, v: m.average.detach().copy_(v),
}


def _averaging(way):
    def forward(self, h, x):
        h = flow.tanh(h)
        way(self, h.mean(0).detach())
        self.count += 1
        return h - self.average.clone() + 0.1 / (1.0 + self.count.to(flow.float32))

    return forward


for _number, (_name, _way) in enumerate(WAYS.items()):
    plant(name=f"buffer, {_name}", accumulation=1 + _number % 2)(_averaging(_way))

#: changes of a buffer after it was read
OVERWRITES = {
    "mul_": lambda m, v: m.scale.mul_(0.9),
    "copy_": lambda m, v: m.scale.copy_(m.scale * 0.9 + v),
    "slice": lambda m, v: m.scale.__setitem__(slice(None), m.scale * 0.9),
    "part": lambda m, v: m.scale.__setitem__(slice(2), 1.5),
    "through detach": lambda m, v: m.scale.detach().add_(v),
    "data": lambda m, v: setattr(m.scale, "data", m.scale * 0.9 + v),
    "assign": lambda m, v: setattr(m, "scale", m.scale * 0.9 + v),
    "function": lambda m, v: flow._C.leaky_relu(m.scale.sub_(1.1), 0.5, True),
    "there and back": lambda m, v: (m.scale.mul_(2.0), m.scale.mul_(0.5)),
}
#: changes through another tensor that shares the buffer's memory, which PyTorch also refuses
SHARED = {
    "view": lambda m, v: m.scale.view(WIDTH, 1).mul_(0.9),
}


def _overwriting(way):
    def forward(self, h, x):
        h = h / self.scale
        way(self, h.abs().mean(0).detach())
        return h

    return forward


for _name, _way in OVERWRITES.items():
    plant(name=f"buffer read before, {_name}", accumulation=2)(_overwriting(_way))
for _name, _way in SHARED.items():
    plant("refused", "refused", name=f"buffer read before, {_name}")(_overwriting(_way))


@plant(accumulation=2)
def a_buffer_read_between_changes(self, h, x):
    h = h / self.scale
    self.scale.mul_(0.9)
    h = h * self.scale
    self.scale = self.scale + h.abs().mean(0).detach()
    h = h / self.scale
    self.scale += 1.0
    return h


@plant()
def a_frozen_parameter_that_moves(self, h, x):
    h = h / self.teacher
    self.teacher.data.mul_(0.9)
    return h


@plant(accumulation=3)
def a_buffer_that_returns_within_an_update(self, h, x):
    self.count.copy_((self.count + 1) % 3)
    return h * (1.0 + self.count.clone())


def _with_shared_memory(layer):
    layer.other = nn.Linear(WIDTH, WIDTH)
    layer.other.weight.data = layer.inner.weight.data
    layer.register_buffer("shared", layer.inner.weight.data)


@plant(setup=_with_shared_memory)
def tensors_with_shared_memory(self, h, x):
    return self.other(flow.tanh(self.inner(h))) * self.shared.mean()


def _with_views(**views):
    def setup(layer):
        for name, view in views.items():
            layer.register_buffer(name, view(layer.inner.weight.data))

    return setup


@plant(setup=_with_views(part=lambda weight: weight[2:4]))
def a_part_of_a_parameter(self, h, x):
    return self.inner(h) * self.part.mean()


@plant(
    "refused", "refused", named="middle.turned", setup=_with_views(turned=lambda weight: weight.t())
)
def a_transpose_of_a_parameter(self, h, x):
    return self.inner(h) @ self.turned


def _with_two_types(layer):
    layer.temperature = nn.Parameter(flow.tensor(0.5, dtype=flow.float64))


@plant(setup=_with_two_types, options={"max_grad_norm": 1e6})
def one_norm_over_two_types(self, h, x):
    return h * self.temperature.to(flow.float32)


@plant("right", "refused")
def an_old_view_of_a_buffer(self, h, x):
    view = self.scale.view(1, WIDTH)
    self.scale.mul_(0.9)
    return h + view.sum()


@plant()
def a_buffer_with_a_gradient(self, h, x):
    self.average = self.average * 0.9 + h.mean(0)
    return h


def _with_an_unsaved_buffer(layer):
    layer.register_buffer("unsaved", flow.ones(1), persistent=False)


@plant(setup=_with_an_unsaved_buffer)
def a_buffer_that_no_checkpoint_holds(self, h, x):
    self.unsaved += 1
    self.average.copy_(h.mean(0).detach())
    return h / self.unsaved.clone() + self.average.clone()


@plant()
def a_buffer_registered_again(self, h, x):
    self.register_buffer("average", self.average * 0.9 + h.mean(0).detach())
    return h * self.average


@plant("refused", "refused", named="average")
def a_buffer_that_grows(self, h, x):
    self.average = flow.cat([self.average, h.mean(0).detach()])
    return h


@plant()
def a_buffer_of_another_type(self, h, x):
    self.average = self.average.to(flow.float64)
    return h


@plant(setup=with_a_norm, accumulation=2)
def batch_statistics(self, h, x):
    return self.norm(self.norm(h))


@plant(setup=with_a_norm)
def a_frozen_batch_norm(self, h, x):
    self.norm.eval()
    return self.norm(h)


@plant(setup=with_a_norm)
def a_batch_norm_that_nobody_calls(self, h, x):
    return h


def _with_a_temperature(layer):
    layer.temperature = nn.Parameter(flow.tensor(0.5))


@plant(setup=_with_a_temperature)
def a_parameter_without_dimensions(self, h, x):
    return h * self.temperature


class Block(Middle):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, h):
        h = flow.tanh(self.inner(h)) / self.scale
        self.way(self, h.abs().mean(0).detach())
        return h * self.scale


class Blocks(Net):
    """Two blocks whose activations are computed again in the backward pass."""

    plan = {"blocks": "layers"}

    def __init__(self, way):
        super().__init__(nn.Identity())
        self.layers = nn.Sequential(*[Block(way) for _ in range(2)])

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.second(self.layers(self.first(x))), y)}}


for _name in ("assign", "copy_"):
    FAULTS[f"blocks computed again, {_name}"] = Fault(
        functools.partial(Blocks, OVERWRITES[_name]),
        accumulation=2,
        options={"activation_checkpoint": True},
    )


class Counts(Net):
    """A model with two losses, one of them an integer."""

    def forward(self, x, y):
        losses = {"cls": F.cross_entropy(self.second(self.first(x)), y), "count": (y >= 0).sum()}
        return {"losses": losses}


FAULTS["an integer loss"] = Fault(lambda: Counts(nn.Identity()))
