"""Operations of a compiled step that share the cores have one compute thread."""

import oneflow as flow
import pytest
import toy

from libai.patches.job import passes

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("threads", "expected"), [(2, {"compute-0"}), (1, {""})])
def test_shared_operations_take_one_thread(monkeypatch, threads, expected):
    monkeypatch.setattr(passes, "threads_in_use", lambda: threads)
    model = toy.Classifier()
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = toy.trainer_of("graph", model, toy.batches(2), optimizer)
    trainer.train(0, 2)
    assert {op.stream_name_hint for op in trainer.graph._full_job_proto.net.op} == expected
