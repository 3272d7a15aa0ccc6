"""Faults in Python state: attributes, globals, random numbers, clocks, and hooks."""

import functools
import random
import threading
import time

import numpy as np
import oneflow as flow
from oneflow import nn
from planting import FAULTS, SCALES, STEPS, WIDTH, Fault, Middle, Net, plant, with_a_norm

# ----------------------------------------------------------------------------------------------
# Python state


@plant()
def an_attribute_that_counts(self, h, x):
    self.calls += 1
    return h


@plant("right", "refused", named="middle")
def a_counter_that_branches(self, h, x):
    self.calls += 1
    return h * 2 if self.calls > 2 else h


@plant(
    "right",
    "refused",
    named="middle",
    options={"rehearse": 3},
    setup=lambda layer: layer.inner.weight.requires_grad_(False),
)
def a_parameter_unfrozen_later(self, h, x):
    self.calls += 1
    if self.calls == 3:
        self.inner.weight.requires_grad_(True)
    return self.inner(h)


class _FilledByAHook(Middle):
    def __init__(self):
        super().__init__()
        self.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, h, x):
        self.seen.clear()
        h = self.inner(h)
        return h + 0.1 * self.seen[0] * self.seen[-1]


FAULTS["a list that forward empties and a hook fills"] = Fault(lambda: Net(_FilledByAHook()))


class _Queue(Middle):
    """Repeats what it saw four calls ago. Only the user calls `forget`, between two epochs."""

    def forget(self):
        self.seen.clear()

    def forward(self, h, x):
        self.seen.append(h.detach())
        return h + self.seen.pop(0) if len(self.seen) > 4 else h


class _CarriedOver(Middle):
    def forward(self, h, x):
        last = self.seen[-1]
        self.seen = []
        self.seen.append(h.detach().mean())
        return h + last


FAULTS["a list of outputs that the user empties"] = Fault(
    lambda: Net(_Queue()), "right", "refused", "middle"
)
FAULTS["a list that carries an output over"] = Fault(
    lambda: Net(_CarriedOver()), "right", "refused"
)


class _FilledByKey(Middle):
    def __init__(self):
        super().__init__()
        self.kept = {}
        self.inner.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept["inner"] = output

    def forward(self, h, x):
        return self.inner(h) + 0.1 * self.kept["inner"] ** 2


FAULTS["a dict that a hook fills by key"] = Fault(lambda: Net(_FilledByKey()))


@plant("right", "refused", named="middle", setup=lambda layer: setattr(layer, "kept", {}))
def a_dict_that_keeps_the_last_two(self, h, x):
    self.kept[self.calls % 2] = h.detach()
    self.calls += 1
    return h + self.kept[0].mean() - self.kept[max(self.kept)].mean()


@plant(setup=lambda layer: setattr(layer, "heads", {"one": layer.inner}))
def a_module_in_a_plain_dict(self, h, x):
    for head in self.heads.values():
        h = head(h)
    return h


def _calling_around(layer):
    inner = layer.inner
    layer.around = lambda h: inner(h).tanh()


@plant(setup=_calling_around)
def a_module_in_a_closure(self, h, x):
    return self.around(h)


@plant("right", "refused", named="middle")
def an_average_in_an_attribute(self, h, x):
    mean = h.detach().mean()
    self.last = mean if self.last is None else self.last * 0.9 + mean
    return h + self.last


@plant("right", "refused", named="middle")
def the_scale_of_the_first_batch(self, h, x):
    if self.last is None:
        self.last = x.std().detach()
    return h * self.last


@plant("right", "refused")
def a_global_of_the_first_batch(self, h, x):
    if "scale" not in SCALES:
        SCALES["scale"] = h.detach().abs().mean()
    return h / SCALES["scale"]


def _with_an_own_call(layer):
    def call(self, *args):
        return nn.Module.__call__(self, *args) * 0.5

    for module in (layer, layer.inner):
        module.__class__ = type("Halved", (type(module),), {"__call__": call})


@plant(setup=_with_an_own_call)
def a_class_with_its_own_call(self, h, x):
    return h + self.inner(h)


def _counting():
    calls = 0

    def scale(h):
        nonlocal calls
        calls += 1
        return h * (1 + 0.1 * calls)

    return scale


def _with_a_counter(layer):
    layer.rescale = _counting()


@plant("right", "refused", setup=_with_a_counter)
def a_closure_that_counts(self, h, x):
    return self.rescale(h)


@plant("right", "refused", named="middle", setup=with_a_norm)
def a_layer_that_toggles(self, h, x):
    h = self.norm(h)
    self.norm.train(not self.norm.training)
    return h


@plant("right", "refused")
def a_number_of_numpy(self, h, x):
    return h * float(np.random.rand())


@plant("right", "refused")
def a_number_of_python(self, h, x):
    return h * (1 + random.random())


@plant("trains", "refused")
def a_number_of_the_system(self, h, x):
    return h * (1 + random.SystemRandom().random())


@plant("trains", "refused")
def a_clock_in_the_loss(self, h, x):
    return h * (1 + time.perf_counter() % 1.0)


@plant("refused", "refused", named="middle.inner.weight")
def a_parameter_clamped_in_forward(self, h, x):
    h = self.inner(h)
    self.inner.weight.data.clamp_(-0.01, 0.01)
    return h


@plant("right", "refused")
def a_branch_on_a_value(self, h, x):
    return h * 2 if h.sum() > 0 else h


@plant(
    "right",
    "refused",
    named="forward computes gradients, but OneFlow 0.9 compiles only gradients of the loss",
)
def a_gradient_that_forward_computes(self, h, x):
    (slope,) = flow.autograd.grad(h.tanh().sum(), h, retain_graph=True)
    return h + slope


def _forever():
    number = 0
    while True:
        number += 1
        yield float(number)


def _with_a_lock(layer):
    layer.lock = threading.Lock()


def _with_a_generator(layer):
    layer.lock = _forever()


@plant(setup=_with_a_lock)
def a_lock(self, h, x):
    with self.lock:
        return h


@plant("trains", "refused", setup=_with_a_generator)
def a_generator(self, h, x):
    return h * next(self.lock)


# ----------------------------------------------------------------------------------------------
# hooks


def _bound(layer):
    """A hook that holds a parameter in a closure."""
    gain = layer.gain
    return lambda module, args, output: output * gain


class _Scales:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, module, args, output):
        return output * self.layer.gain


def _inner(self, h, x):
    return self.inner(h)


def _hooked(hook):
    return lambda layer: layer.inner.register_forward_hook(hook(layer))


_TWICE = _hooked(lambda layer: lambda module, args, output: flow.tanh(output) * 2.0)
plant(name="hook of a function", setup=_TWICE)(_inner)
plant(name="hook with a parameter in a closure", setup=_hooked(_bound))(_inner)
# in a trace the original parameter has no gradient
plant("right", "refused", name="hook of an object with a module", setup=_hooked(_Scales))(_inner)
plant(name="hook of weight norm", setup=lambda layer: nn.utils.weight_norm(layer.inner))(_inner)
plant(
    name="hook before forward",
    setup=lambda layer: layer.inner.register_forward_pre_hook(
        lambda module, args: (flow.tanh(args[0]) + 0.1,)
    ),
)(_inner)


def _count_steps(grad):
    STEPS[0] += 1


def _with_a_hook_that_remembers(layer):
    calls = []

    def hook(grad):
        calls.append(1)
        return grad * (1.0 + len(calls))

    layer.inner.weight.register_hook(hook)


plant(
    accumulation=2,
    name="gradient hook",  # not linear: it must get the gradient of each micro-batch
    setup=lambda layer: layer.inner.weight.register_hook(
        lambda grad: grad.clamp_(-0.02, 0.02) * layer.scale * flow.ones(WIDTH)
    ),
)(_inner)
plant(
    name="gradient hook that changes a buffer",
    setup=lambda layer: layer.inner.weight.register_hook(
        lambda grad: grad * layer.average.mul_(0.9).add_(grad.norm()).mean()
    ),
)(_inner)


def _frozen_for_a_while(layer):
    """OneFlow drops the hooks, but raises an error if the data of the frozen parameter is set."""
    weight = layer.inner.weight
    weight.register_hook(lambda grad: grad * 3.0)
    weight.requires_grad_(False)
    weight.data = weight.data * 0.5
    weight.requires_grad_(True)


plant(name="gradient hook of a parameter that was frozen", setup=_frozen_for_a_while)(_inner)
plant("right", "refused", name="gradient hook that remembers", setup=_with_a_hook_that_remembers)(
    _inner
)


@plant(
    accumulation=2,
    setup=lambda layer: setattr(layer, "norm", nn.BatchNorm1d(WIDTH, track_running_stats=False)),
)
def a_norm_without_statistics(self, h, x):
    return self.norm(h)


@plant(accumulation=2, setup=lambda layer: layer.inner.double())
def parameters_in_float64(self, h, x):
    return self.inner(h.double()).float()


@plant(accumulation=2)
def a_layer_that_is_frozen_in_between(self, h, x):
    """As the discriminator of a GAN while the generator's loss is computed."""
    first = self.inner(h)
    self.inner.requires_grad_(False)
    second = self.inner(flow.relu(h))
    self.inner.requires_grad_(True)
    return first * second


@plant("refused", "refused", named="Create it in __init__")
def a_layer_created_in_forward(self, h, x):
    self.late = nn.Linear(WIDTH, WIDTH)
    return self.late(h)


@plant(accumulation=2)
def a_gradient_hook_of_an_activation(self, h, x):
    h = self.inner(h)
    h.register_hook(
        lambda grad: grad.sign()
    )  # not linear: it must see the gradients of single micro-batches
    return h


@plant()
def a_gradient_hook_of_an_activation_that_counts(self, h, x):
    h = self.inner(h)
    h.register_hook(_count_steps)
    return h


@plant(accumulation=3)
def a_gradient_that_is_only_rounding(self, h, x):
    """Add one number to all inputs of the softmax, which ignores it."""
    return h + flow.softmax(h + 5000.0 * self.gain.mean(), -1)


@plant("right", "refused", named="middle")
def a_counter_that_is_read_on_its_line(self, h, x):
    self.calls += 1; h = h * (2 if self.calls > 3 else 1)  # noqa: E702  # fmt: skip
    return h


@functools.cache
def _doubled(self, width):
    return 2 * width


@plant(setup=lambda layer: setattr(type(layer), "doubled", _doubled))
def a_cached_method_and_a_counter_over_two_lines(self, h, x):
    self.calls = (
        self.calls  # fmt: skip
        + 1
    )
    return h * self.doubled(WIDTH)
