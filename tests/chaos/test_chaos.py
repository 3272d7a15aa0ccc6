"""Random faults strike real jobs: each is survived or ends with a clear error, and the run goes on
as it was.
"""

import signal

import pytest
from campaign import Job, draw, judge, run

#: faults of the campaign in this test; `bash tools/chaos.sh 200 --seed S` runs others
SEED, COUNT = 1, 20

GOOD = {1: 2.0, 2: 1.0}
STRUCK = 1


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_fault_is_survived_or_a_clear_error(number):
    fault = draw(SEED, number)
    verdict = run(fault)
    assert verdict.outcome in ("survived", "clean error"), f"{fault}: {verdict}"


def ended(code=0, stderr=""):
    return Job(code, stderr, [])


@pytest.mark.parametrize(
    "struck, resumed, losses, outcome",
    [
        (ended(), None, GOOD, "survived"),
        (ended(1, "launch: rank 1 failed first"), ended(), GOOD, "clean error"),
        (
            ended(-signal.SIGKILL),
            ended(),
            GOOD,
            "clean error",
        ),  # the launcher cannot print a last message
        (ended(None), None, GOOD, "hang"),
        (ended(1), ended(), GOOD, "silent"),
        (ended(1, "error: rank 0: failed"), ended(), GOOD, "silent"),
        (ended(), None, {1: 2.0, 2: 1.1}, "silent"),
    ],
)
def test_the_judge_tells_good_ends_from_bad_ones(struck, resumed, losses, outcome):
    assert judge(struck, resumed, losses, GOOD, STRUCK).outcome == outcome
