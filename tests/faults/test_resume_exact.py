"""2 N iterations equal N iterations plus N in a fresh process, byte for byte.

The tests run `libai verify-resume`.
"""

import json

import pytest
from jobs import LIBAI, run

from libai.cli.commands import verify_resume
from libai.engine.run.verify_resume import Comparison

pytestmark = pytest.mark.e2e

#: dropout, accumulation and loader threads; the stop after 2 x 24 of 1438 samples is in the middle
#: of an epoch
HARD = [
    "model.dropout=0.2",
    "train.train_micro_batch_size=12",
    "train.num_accumulation_steps=2",
    "dataloader.train.num_workers=2",
    "train.evaluation.eval_period=3",
]

#: cases that tests/faults/test_table.py comes close to
MORE = [("true", "1"), ("false", "1"), ("false", "2")]


def verify(*arguments, timeout=240):
    done = run(
        [
            *LIBAI,
            "verify-resume",
            "configs/mlp_digits.py",
            *arguments,
            "--json",
        ],
        timeout=timeout,
    )
    assert done.returncode in (0, 1), done
    return done.returncode, json.loads(done.stdout)


@pytest.mark.launch
@pytest.mark.parametrize(
    "graph, procs",
    [
        pytest.param("true", "2", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE),
    ],
)
def test_a_resumed_run_is_the_same_to_the_last_byte(graph, procs):
    code, report = verify(*HARD, f"graph.enabled={graph}", "--procs", procs, "--iters", "4")
    assert (code, report["verdict"]) == (0, "exact"), report
    assert report["numbers"] >= 8 * 3 and report["tensors"] == 6 + 12


def test_a_difference_is_reported(monkeypatch, capsys):
    """tests/contract/test_resume_faults.py tests the faults that cause such a difference."""
    found = Comparison(numbers=3, tensors=2, differences={"model/w": "1 of 4 values differ"})
    monkeypatch.setattr("libai.engine.run.verify_resume.compare", lambda *_: found)
    monkeypatch.setattr(verify_resume, "start_job", lambda *_: 0)
    assert verify_resume.run(["configs/mlp_digits.py"]) == 1
    *_, difference, verdict = capsys.readouterr().out.splitlines()
    assert difference == "differs: model/w: 1 of 4 values differ" and verdict.startswith("broken: ")
