"""A compiled CPU step uses one compute thread if the cores share each operation."""

import pytest
from toy import make_trainer

from libai.patches.job import passes

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("threads, expected", [(2, {"compute-0"}), (1, {""})])
def test_one_thread_computes_operations_that_the_cores_share(monkeypatch, threads, expected):
    monkeypatch.setattr(passes, "threads_in_use", lambda: threads)
    trainer = make_trainer("graph")
    trainer.train(0, 2)
    assert {op.stream_name_hint for op in trainer.graph._full_job_proto.net.op} == expected
