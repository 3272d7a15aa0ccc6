"""Faults by changes in place and through views, and by code that behaves differently while a graph
is traced.
"""

from __future__ import annotations

import oneflow as flow
import oneflow.nn.functional as F
from planting import WIDTH, plant

from libai.patches.internals import is_tracing

# ----------------------------------------------------------------------------------------------
# changes in place


@plant("refused", "right")
def a_sigmoid_that_is_added_to(self, h, x):
    h = flow.sigmoid(h)
    h += 1
    return h


@plant("refused", "right")
def a_square_whose_root_is_zeroed(self, h, x):
    square = h * h
    h[:, :2] = 0
    return square + h


@plant()
def columns_that_are_replaced(self, h, x):
    h = h * 1.0
    h[:, flow.tensor([0, 2])] = self.gain[:2]
    return h


@plant()
def one_entry_of_each_sample(self, h, x):
    h = h * 1.0
    h[flow.arange(12), flow.arange(12) % WIDTH] = 0.5
    return h


@plant()
def samples_chosen_by_a_mask(self, h, x):
    h = h * 1.0
    h[x.mean(1) > 0] = self.gain
    return h


@plant()
def a_buffer_that_is_written_by_index(self, h, x):
    self.scale[flow.tensor([2, 0])] = self.gain.detach()[:2] * 0.5
    return h * self.scale


@plant()
def a_relu_in_place(self, h, x):
    return F.relu(h, inplace=True)


@plant()
def a_residual_in_place(self, h, x):
    """The sum keeps its terms, although its derivative needs only their shapes."""
    a = F.relu(h)
    b = a + h
    h *= 2.0
    return F.relu(b, inplace=True)


@plant()
def a_clamp_in_place(self, h, x):
    h = h * 1.0
    h.clamp_(-0.5, 0.5)
    return h


@plant("refused", "refused", accumulation=2)
def a_change_in_place_beside_a_buffer(self, h, x):
    self.average.mul_(0.9)
    h = flow.sigmoid(h)
    return h.add_(1.0) * self.average


@plant()
def a_clamp_of_a_trained_parameter_that_changes_nothing_yet(self, h, x):
    with flow.no_grad():
        self.gain.clamp_(-9.0, 9.0)
    return h * self.gain


@plant()
def a_tensor_filled_by_parts(self, h, x):
    out = flow.zeros_like(h)
    out[:, :4] = h[:, 4:]
    out[:, 4:] = h[:, :4]
    return out


class LeansOnTheMode(flow.autograd.Function):
    """Returns a different gradient while a graph is traced."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.05 if grad.is_lazy else 1)


def _leaning(self, h, x):
    return LeansOnTheMode.apply(h)


for _name, _facts in {
    "momentum": {},
    "decay": {"accumulation": 3},
    "rate of zero": {},
    "adamw": {"options": {"max_grad_norm": 100.0}},
}.items():
    plant("right", "refused", name=f"gradient of the mode, {_name}", optimizer=_name, **_facts)(
        _leaning
    )


@plant("right", "refused")
def a_layer_detached_in_graphs(self, h, x):
    return h.detach() if is_tracing() else h


@plant("right", "refused")
def a_buffer_that_counts_twice_in_graphs(self, h, x):
    self.count += 2 if is_tracing() else 1
    return h / (1 + self.count.to(flow.float32))


# ----------------------------------------------------------------------------------------------
# views

#: names of changes that reach another view of the memory for local tensors, but not in graphs or
#: for global tensors
LOST = []
#: names of changes that have the same result everywhere
KEPT = []


def view(names: list[str], graph: str, eager: str = "right"):
    """Add the decorated function to the list of faults, with an `h` that owns its memory, and its
    name to `names`.
    """

    def add(change):
        def forward(self, h, x):
            return change(self, h * 1)

        name = change.__name__.replace("_", " ")
        plant(eager, graph, name=name)(forward)
        names.append(name)
        return change

    return add


@view(LOST, "refused", "refused")
def the_whole_through_a_view(m, h):
    h.view(-1, 4).mul_(2)
    return h


@view(LOST, "refused", "refused")
def an_item_of_a_transpose(m, h):
    h.transpose(0, 1)[1].mul_(2)
    return h


@view(LOST, "refused", "refused")
def the_base_of_a_chunk(m, h):
    first, second = h.chunk(2, 1)
    first.mul_(2)
    return h


@view(LOST, "refused", "refused")
def a_view_of_a_view(m, h):
    h.view(-1, 4)[:, 0].mul_(0.5)
    return h


@view(LOST, "refused", "refused")
def a_function_in_place(m, h):
    rectified = F.relu(h.flatten(), inplace=True)
    return h + rectified.view(-1, WIDTH)


@view(LOST, "refused")
def an_older_view(m, h):
    older = h.view(-1, 4)
    h += 1
    return older.view(-1, WIDTH)


@view(LOST, "refused", "refused")
def two_views_that_overlap(m, h):
    left, right = h[:, :6], h[:, 2:]
    left.mul_(2)
    return flow.cat([right, h[:, :2]], 1)


@view(LOST, "refused")
def a_part_of_a_buffer(m, h):
    m.scale.view(2, 4)[0].mul_(0.9)
    return h * m.scale.clone()


@view(KEPT, "right")
def chunks_that_meet_again(m, h):
    first, second = h.chunk(2, 1)
    first.mul_(2)
    return flow.cat([first, second], 1)


@view(KEPT, "right")
def a_view_that_takes_the_place(m, h):
    h = h.view(-1, 4)
    h.mul_(2)
    return h.view(-1, WIDTH)


@view(KEPT, "right")
def elements_by_index(m, h):
    h[:, 1] = 0.5
    return h


@view(KEPT, "right")
def what_was_detached(m, h):
    shift = h.detach().clone()
    shift.mul_(2)
    return h + shift
