"""Every planted fault trains like the plain loop or is refused before the first update, in both
modes.
"""

import faults
import pytest


def cases():
    """Return all faults in both modes.

    Each fault has a mode a day, and each refusal too. The default command runs those that eager
    mode refuses and samples of the others.
    """
    for number, (name, fault) in enumerate(faults.FAULTS.items()):
        for mode, part, share in (("eager", 0, 8), ("graph", 1, 16)):
            is_refused = getattr(fault, mode) == "refused"
            is_daily = number % 2 == part and "refused" not in (fault.eager, fault.graph)
            mark = pytest.mark.e2e if is_refused or is_daily else pytest.mark.nightly
            if (is_daily and number % share == part) or (is_refused and mode == "eager"):
                mark = pytest.mark.promise
            yield pytest.param(name, mode, marks=mark)


@pytest.mark.parametrize("name, mode", list(cases()))
def test_a_planted_fault_has_its_verdict(name, mode):
    fault = faults.FAULTS[name]
    found = faults.outcome(faults.case_of(fault), mode, **fault.options)
    verdict = getattr(fault, mode)
    if verdict == "trains":
        assert found.partition(":")[0] in ("right", "wrong"), found
        return
    assert found.partition(":")[0] == verdict, found
    if verdict == "refused":
        assert fault.named in found


@pytest.mark.promise
def test_a_fault_gives_a_wrong_result_without_a_rehearsal():
    """Negative control: without a rehearsal the gradient is wrong."""
    fault = faults.FAULTS["gradient of the mode, momentum"]
    assert faults.outcome(faults.case_of(fault), "graph", rehearse=0).startswith("wrong")
