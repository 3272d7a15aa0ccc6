"""Plain models, written without regard to modes or meshes, train the same in both modes and in
PyTorch.
"""

import json
from pathlib import Path

import pytest
import zoo_data
from marks import nightly_but
from parity_cases import TRAINERS, compare, different_tensors, expected_of, plain_loop, trained
from zoo_runs import BOUND, FAST, case_of, difference, expected, optimizer_name, zoo

# OneFlow 0.9.0 says so of its own flow.zeros in a graph
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is called in a nn.Graph, but not registered:UserWarning"
)

TWINS = json.loads((Path(__file__).parent / "twins.json").read_text(encoding="utf-8"))["losses"]
QUICK = ("variance_penalty",)


def cases():
    """Return the models that both modes train; half of them accumulate gradients."""
    for number, name in enumerate(sorted(zoo().keys() - {"gated_in_place"})):
        mark = pytest.mark.e2e if name in FAST else pytest.mark.nightly
        yield pytest.param(name, 1 + number % 2, marks=[] if name in QUICK else mark)


@pytest.mark.promise
@pytest.mark.parametrize("name, accumulation", list(cases()))
def test_a_plain_model_trains_alike_in_both_modes(name, accumulation):
    case = case_of(name, accumulation)
    eager, graph = (trained(case, mode, rehearse=1) for mode in TRAINERS)
    assert difference(eager, expected_of(case)) <= BOUND
    assert different_tensors(eager, graph) == [] and eager.losses == graph.losses


@pytest.mark.parametrize("name", sorted(TWINS))
def test_a_plain_model_trains_as_its_twin_in_pytorch_does(name):
    losses, twin = expected(name).losses, TWINS[name][optimizer_name(name)]
    assert len(losses) == len(twin) == zoo_data.ITERATIONS
    # measured: at most 4e-6
    assert max(abs(a / b - 1) for a, b in zip(losses, twin)) <= BOUND


@pytest.mark.e2e
@pytest.mark.parametrize("name", nightly_but(sorted(zoo()), *QUICK, "lstm", "memory_queue"))
def test_a_small_fault_in_any_model_is_seen(name):
    """Negative control, by the losses alone."""
    case = case_of(name)

    def faster(model):
        optimizer = case.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer

    assert compare(plain_loop(case.with_(optimizer=faster)), expected(name)).loss > BOUND


@pytest.mark.e2e
def test_models_that_couple_their_samples_are_other_models_on_parts_of_a_batch():
    """Negative control: what `couples` says is so, and no other model without buffers does."""
    coupled = {
        name
        for name, (model, _) in zoo().items()
        if not list(model().buffers())
        and difference(plain_loop(case_of(name), micro_batches=2), expected(name)) > BOUND
    }
    assert coupled == {name for name, (model, _) in zoo().items() if hasattr(model, "couples")}
