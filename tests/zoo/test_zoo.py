"""Plain models, written without regard to modes or meshes, train the same in both modes and in
PyTorch.
"""

import json
from pathlib import Path

import pytest
import zoo_data
from zoo_runs import (
    BOUND,
    FAST,
    Cell,
    difference,
    expected,
    expected_of,
    optimizer_name,
    plain_loop,
    trained,
    zoo,
)

# OneFlow 0.9.0 says so of its own flow.zeros in a graph
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is called in a nn.Graph, but not registered:UserWarning"
)

TWINS = json.loads((Path(__file__).parent / "twins.json").read_text(encoding="utf-8"))["losses"]
QUICK = ("translator", "variance_penalty")


@pytest.mark.promise
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.e2e) for name in FAST]
)
def test_a_plain_model_trains_alike_in_both_modes(mode, name):
    for accumulation in (1, 2):
        cell = Cell(name, mode, accumulation=accumulation)
        assert difference(trained(cell), expected_of(cell)) <= BOUND, cell


@pytest.mark.parametrize("name", sorted(TWINS))
def test_a_plain_model_trains_as_its_twin_in_pytorch_does(name):
    losses, twin = expected(name).losses, TWINS[name][optimizer_name(name)]
    assert len(losses) == len(twin) == zoo_data.ITERATIONS
    # measured: at most 4e-6
    assert max(abs(a / b - 1) for a, b in zip(losses, twin)) <= BOUND


def _shrink_the_parameters(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.999)


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(zoo()))
def test_a_small_fault_in_any_model_is_seen(name):
    """Negative control: weights that shrink by a thousandth at each update."""
    assert difference(plain_loop(name, spoil=_shrink_the_parameters), expected(name)) > BOUND


@pytest.mark.e2e
def test_models_that_couple_their_samples_are_other_models_on_parts_of_a_batch():
    """Negative control: what `couples` says is so, and no other model without buffers does."""
    coupled = {
        name
        for name, (model, _) in zoo().items()
        if not list(model().buffers())
        and difference(plain_loop(name, parts=2), expected(name)) > BOUND
    }
    assert coupled == {name for name, (model, _) in zoo().items() if hasattr(model, "couples")}
