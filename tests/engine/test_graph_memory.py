"""The memory that a compiled step takes on CPU is counted from its job, and one that will not fit is told before."""

from __future__ import annotations

import logging

import oneflow as flow
import pytest
import toy

from libai.engine.compiled import memory as graph_memory


def compiled(batch_size, width=16):
    flow.manual_seed(0)
    net = toy.Classifier(width)
    trainer = toy.trainer_of("graph", net, toy.batches(2, batch_size), toy.optimizer_of("sgd", net))
    trainer.prepare()
    return trainer


def test_what_each_operation_makes_is_counted_once(monkeypatch):
    monkeypatch.setattr(graph_memory, "is_memory_planned", lambda: False)
    small, large = compiled(8), compiled(16)
    hidden = 16 * 4  # bytes of a row behind the first layer, which several operations make
    assert large.graph.num_bytes - small.graph.num_bytes >= 8 * 3 * hidden


@pytest.mark.parametrize("left, is_told", [(10, True), (1 << 40, False), (None, False)])
def test_a_step_that_will_not_fit_is_told_before_it_runs(left, is_told, monkeypatch, caplog):
    monkeypatch.setattr(graph_memory, "available_bytes", lambda: left)
    with caplog.at_level(logging.WARNING, "libai.engine"):
        compiled(8)
    told = [record.getMessage() for record in caplog.records if "the compiled step needs about" in record.getMessage()]
    assert len(told) == is_told
    assert all("graph.enabled=false" in line for line in told)


def test_results_that_share_memory_are_not_added_up(monkeypatch):
    shared = compiled(64).graph.num_bytes
    monkeypatch.setattr(graph_memory, "is_memory_planned", lambda: False)
    assert shared < 0.75 * compiled(64).graph.num_bytes
