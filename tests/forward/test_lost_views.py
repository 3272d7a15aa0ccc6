"""Changes of global tensors that views of them do not see: refused where something reads them afterwards."""

import oneflow as flow
import oneflow.nn.functional as F
import pytest
from oneflow import nn

from libai.forward.lost_views import ViewWrites, refuse_lost_changes
from libai.utils.errors import UserError


class Net(nn.Module):
    """A forward that a test chooses, with a buffer for it."""

    def __init__(self, between):
        super().__init__()
        self.register_buffer("seen", flow.zeros(8))
        self.between = between

    def forward(self, h):
        return self.between(h * 1, self)


def the_whole_through_a_view(h, net):
    h.view(-1, 4).mul_(2)
    return h


def the_base_of_a_chunk(h, net):
    first, second = h.chunk(2, 1)
    first.mul_(2)
    return h


def a_function_in_place(h, net):
    rectified = F.relu(h.flatten(), inplace=True)
    return h + rectified.view(4, 8)


def an_older_view(h, net):
    older = h.view(-1, 4)
    h += 1
    return older


@pytest.mark.parametrize(
    "between",
    [
        the_whole_through_a_view,
        the_base_of_a_chunk,
        a_function_in_place,
        an_older_view,
    ],
)
def test_a_change_that_is_lost_is_refused(between):
    net, forward, lines = watch(between)
    with pytest.raises(UserError, match=r"test_lost_views.py:\d+: `.*`\. On several ranks"):
        refuse_lost_changes(net, forward, lines)


def chunks_that_meet_again(h, net):
    first, second = h.chunk(2, 1)
    first.mul_(2)
    return flow.cat([first, second], 1)


def a_base_that_nobody_reads(h, net):
    view = h.view(-1, 4)
    view.mul_(2)
    return view


@pytest.mark.parametrize(
    "between",
    [
        chunks_that_meet_again,
        a_base_that_nobody_reads,
    ],
)
def test_a_change_that_local_tensors_would_not_share_either_is_none(between):
    net, forward, lines = watch(between)
    refuse_lost_changes(net, forward, lines)
    local = flow.randn(4, 8)
    everywhere = flow.placement.all("cpu")
    laid_out = local.clone().to_global(placement=everywhere, sbp=flow.sbp.broadcast)
    assert (between(laid_out, net).to_local() - between(local, net)).abs().max().item() == 0


def watch(between):
    everywhere = flow.placement.all("cpu")
    net = Net(between).to_global(placement=everywhere, sbp=flow.sbp.broadcast)
    inputs = flow.randn(4, 8).to_global(placement=everywhere, sbp=flow.sbp.broadcast)
    writes = ViewWrites()
    writes.watching(lambda: net(inputs))()
    net.seen.zero_()
    return net, lambda model: model(inputs), list(writes.lines)
