"""Compiled data-parallel steps with joined gradients and with one message per gradient, on the
ranks of one job.

Started by test_graph_gradients.py. Ends with exit code 1 if a number or a count is wrong.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock


def main() -> None:
    from dataclasses import replace

    import mesh_cases

    case = replace(mesh_cases.plain(), accumulation=2, max_norm=mesh_cases.CLIPPED)
    losses, tensors, messages = run(case)
    losses_alone, tensors_alone, messages_alone = run(case, joins=False)
    # two ranks: each sum is of two numbers, in whatever message, so that no bit may differ
    assert losses == losses_alone, (losses, losses_alone)
    for name, values in tensors.items():
        assert (values == tensors_alone[name]).all(), name
    assert messages == 1 < messages_alone, (messages, messages_alone)
    print("all checks passed", flush=True)


def run(case, joins=True):
    """Return losses, weights and the number of gradient messages of some iterations."""
    from mesh_cases import Planned, build_trainer, record, tensors_of

    from libai.patches.job import passes
    from libai.patches.job.gradients import edges_of_gradients
    from libai.patches.job.job_edit import JobEdit

    with nullcontext() if joins else mock.patch.object(passes, "join_gradients", lambda job: None):
        trainer = build_trainer(Planned("", case, (2, 1, 1), "graph", iterations=3))
        lines = record(trainer)
        trainer.train(0, 3)
    messages = edges_of_gradients(JobEdit(trainer.graph._full_job_proto))
    return [line["train/loss"] for line in lines], tensors_of(trainer.model), len(messages)


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main)
