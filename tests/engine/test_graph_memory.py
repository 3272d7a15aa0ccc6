"""The memory that a compiled step takes on CPU is counted from its job, and one that will not fit is told before."""

from __future__ import annotations

import logging

import oneflow as flow
import pytest
import toy

from libai.engine.graph import memory as graph_memory
from libai.engine.graph.memory import available_bytes, bytes_of_values
from libai.parallel import Mesh


def compiled(batch_size, width=16):
    flow.manual_seed(0)
    net = toy.Classifier(width)
    trainer = toy.trainer_of("graph", net, toy.batches(2, batch_size), toy.optimizer_of("sgd", net))
    trainer.prepare()
    return trainer


def test_what_each_operation_makes_is_counted_once():
    small, large = compiled(8), compiled(16)
    hidden = 16 * 4  # bytes of a row behind the first layer, which several operations make
    assert large.graph.num_bytes - small.graph.num_bytes >= 8 * 3 * hidden


def test_a_split_value_counts_with_its_part():
    job = compiled(8).graph._full_job_proto
    whole = bytes_of_values(job, Mesh(2))
    for op in job.net.op:
        for name in [name for entry in op.user_conf.output.values() for name in entry.s]:
            entry = job.job_parallel_view_conf.op_name2nd_sbp_signature_conf[op.name]
            layout = entry.bn_in_op2nd_sbp[name.split("/")[1]]
            del layout.sbp_parallel[:]
            layout.sbp_parallel.add().split_parallel.axis = 0
    assert whole / 2 <= bytes_of_values(job, Mesh(2)) <= whole / 2 + 2 * len(job.net.op)


@pytest.mark.parametrize("left, is_told", [(10, True), (1 << 40, False), (None, False)])
def test_a_step_that_will_not_fit_is_told_before_it_runs(left, is_told, monkeypatch, caplog):
    monkeypatch.setattr(graph_memory, "available_bytes", lambda: left)
    with caplog.at_level(logging.WARNING, "libai.engine"):
        compiled(8)
    told = [record.getMessage() for record in caplog.records if "the compiled step needs about" in record.getMessage()]
    assert len(told) == is_told
    assert all("graph.enabled=false" in line and "CUDA" in line for line in told)


def test_the_machine_tells_what_is_left():
    left = available_bytes()
    assert left is None or left > 1 << 20
