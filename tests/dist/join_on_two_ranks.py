"""Compiled data-parallel steps with joined gradients and with one message for each, on the ranks of one job.

Started by test_graph_gradients.py. Ends with exit code 1 where a number or a count differs from what it must be.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent, HERE.parent / "parity", HERE)]


def main() -> None:
    from libai.utils.distributed import get_rank

    for name, case in cases().items():
        joined, alone = run(case), run(case, joins=False)
        require_equal(name, joined, alone)
        assert joined.messages == 1, (name, joined.messages)
        if name == "plain":
            parts = run(case, max_bytes=600)
            require_equal(name, parts, alone)
            assert 1 < parts.messages < alone.messages, (parts.messages, alone.messages)
        if get_rank() == 0:
            print(name, "gradients in", joined.messages, "messages instead of", alone.messages, flush=True)
    print("all checks passed", flush=True)


def require_equal(name, run, other):
    """Two ranks: each sum is of two numbers, in whatever message, so that no bit may differ."""
    assert run.losses == other.losses, (name, run.losses, other.losses)
    for tensor, values in run.tensors.items():
        assert (values == other.tensors[tensor]).all(), (name, tensor)


def cases() -> dict:
    from dataclasses import replace

    import mesh_cases

    plain, clipped = mesh_cases.plain(), mesh_cases.CLIPPED
    frozen = replace(plain, model=partial(Frozen, tied=False), max_norm=clipped)
    return {
        "plain": plain,
        "accumulated": replace(plain, accumulation=2, max_norm=clipped),
        "frozen": frozen,
    }


def Frozen(**options):
    import mesh_models as mm

    model = mm.PlainModel(**options)
    model.tokens.weight.requires_grad = False
    return model


def run(case, joins=True, max_bytes=None):
    """Losses, weights and the number of messages in which gradients travel, of some iterations."""
    from types import SimpleNamespace

    from mesh_cases import Planned, build_trainer, record

    from libai.oneflow_fixes.job import passes
    from libai.oneflow_fixes.job.gradients import edges_of_gradients, join_gradients
    from libai.oneflow_fixes.job.job_edit import JobEdit
    from libai.parallel import full_tensor

    counts = []

    def pass_of(job):
        counts.append(join_gradients(job, max_bytes) if max_bytes else join_gradients(job))

    with mock.patch.object(passes, "join_gradients", pass_of if joins else lambda job: None):
        trainer = build_trainer(Planned("", case, (2, 1, 1), "graph", iterations=3))
        lines = record(trainer)
        trainer.train(0, 3)
    assert len(counts) == joins and all(counts), counts
    messages = edges_of_gradients(JobEdit(trainer.graph._full_job_proto))
    tensors = {name: full_tensor(p).numpy() for name, p in trainer.model.named_parameters()}
    return SimpleNamespace(losses=[line["train/loss"] for line in lines], tensors=tensors, messages=len(messages))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main)
