"""The line protocol: what a variant answers, and what it does with what it cannot do."""

from __future__ import annotations

from libai.benchmark import protocol


class Counter(protocol.Variant):
    def facts(self):
        return {"mode": "counter"}

    def run(self, iterations, losses):
        return {"seconds": 0.5, "losses": [1.0] * iterations if losses else []}


def answers(*commands, build=Counter):
    said = []
    protocol.serve(build, [protocol.encode(command) for command in commands], said.append)
    return said


def test_it_is_ready_then_runs_then_quits():
    run, leave = {"command": "run", "iterations": 2, "losses": True}, {"command": "quit"}
    assert answers(run, leave, run) == [
        {"event": "ready", "mode": "counter"},
        {"event": "done", "seconds": 0.5, "losses": [1.0, 1.0]},
    ]


def test_what_it_cannot_do_has_a_reason_and_does_not_end_it():
    said = answers({"command": "dance"}, {"command": "run", "iterations": 1})
    assert [answer["event"] for answer in said] == ["ready", "unavailable", "done"]
    assert said[1]["reason"] == "there is no command 'dance'"


def test_a_variant_that_cannot_be_built_says_so_instead_of_ready():
    def build():
        raise protocol.Unavailable("not here")

    assert answers({"command": "run"}, build=build) == [{"event": "unavailable", "reason": "not here"}]
