"""A compiled CPU step uses one or two compute threads, depending on the cores."""

import pytest
from toy import make_trainer

from libai.patches.job import passes, schedule

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "threads, cores, expected",
    [(2, 2, {"compute-0"}), (1, 1, {""}), (1, 2, {"compute-0", "compute-1"})],
    ids=["shared operations", "one core", "a core for a second thread"],
)
def test_a_second_thread_computes_only_on_a_core_of_its_own(monkeypatch, threads, cores, expected):
    monkeypatch.setattr(passes, "threads_in_use", lambda: threads)
    monkeypatch.setattr(passes, "usable_cores", lambda: cores)
    monkeypatch.setattr(schedule, "_SHORT", 0.0)  # the operations of this model are short
    trainer = make_trainer("graph")
    trainer.train(0, 2)
    assert {op.stream_name_hint for op in trainer.graph._full_job_proto.net.op} == expected
