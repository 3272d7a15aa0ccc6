"""The table of options, and what is refused by it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from libai.config.schema import Dist, Graph, Train
from libai.engine import support
from libai.utils.errors import UserError


def make_run(**graph):
    return SimpleNamespace(train=Train(), graph=Graph(**graph))


def test_defaults_are_supported_everywhere():
    for mode in ("eager", "graph"):
        for device in ("cpu", "cuda"):
            support.check_supported(make_run(), mode, device)


def test_graph_debug_is_refused_in_eager_mode_with_the_remedy():
    with pytest.raises(UserError, match="graph.debug cannot be honoured in eager mode on cpu: .*graph.enabled=true"):
        support.check_supported(make_run(debug=1), "eager", "cpu")
    support.check_supported(make_run(debug=1), "graph", "cpu")


def test_all_refusals_come_together():
    from dataclasses import replace

    run = make_run(debug=1)
    run.train = replace(run.train, amp=replace(run.train.amp, enabled=True))
    with pytest.raises(UserError) as caught:
        support.check_supported(run, "eager", "cpu")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("option", [o for o in support.OPTIONS if o.name.startswith("train.amp")], ids=lambda o: o.name)
def test_amp_needs_cuda(option):
    assert option.verdict("graph", "cuda") == support.YES
    assert "CUDA only" in option.verdict("graph", "cpu")
    assert "no autocast on CPU" in option.verdict("eager", "cpu")


def test_every_no_of_the_table_has_a_note():
    table = support.support_table()
    rows, _, notes = table.partition("\n\n")
    used = {cell.strip("()") for cell in rows.split() if re.fullmatch(r"\(\d+\)", cell)}
    assert used == {line[1 : line.index(")")] for line in notes.splitlines()}
    assert all(option.remedy and option.name in rows for option in support.OPTIONS)


def test_a_way_of_reducing_is_refused_where_the_graph_does_it():
    run = SimpleNamespace(train=Train(dist=Dist(gradient_reduction="flat")), graph=Graph())
    support.check_supported(run, "eager", "cpu")
    with pytest.raises(
        UserError, match="train.dist.gradient_reduction cannot .* graph mode .*itself.*Leave it at auto"
    ):
        support.check_supported(run, "graph", "cpu")
