"""Options that a mode cannot honour on a device are refused, each with a reason and a remedy."""

from types import SimpleNamespace

import pytest

from libai.config.combinations import check_supported
from libai.config.settings.schema import Graph, Train
from libai.utils.errors import UserError

EVERYWHERE = [(mode, device) for mode in ("eager", "graph") for device in ("cpu", "cuda")]
IN_GRAPHS = [("graph", "cpu"), ("graph", "cuda")]
EAGERLY = [("eager", "cpu"), ("eager", "cuda")]
ON_CPU = [("eager", "cpu"), ("graph", "cpu")]
ON_CUDA = [("eager", "cuda"), ("graph", "cuda")]


def make_run(mode, **settings):
    """Return a checked config with changed settings, named by their paths with two underscores for
    each dot.
    """
    run = SimpleNamespace(train=Train(), graph=Graph(), momentum_scheduler=None, mode=mode)
    for path, value in settings.items():
        *sections, name = path.split("__")
        owner = run
        for section in sections:
            owner = getattr(owner, section)
        object.__setattr__(owner, name, value)  # a checked config is frozen
    return run


@pytest.mark.parametrize(
    "settings, where, text",
    [
        ({"train__amp__enabled": True}, ON_CPU, "does nothing on this device"),
        ({"train__amp__enabled": "auto"}, [], ""),
        (
            {"train__activation_checkpoint__enabled": True},
            [("graph", "cpu")],
            "needs more memory with it",
        ),
        ({"train__zero_optimization__enabled": True}, [], ""),
        ({"train__dist__auto": True}, EAGERLY, "auto-parallel is a pass of its graph compiler"),
        ({"train__zero_grad_before_forward": True}, IN_GRAPHS, "there is nothing to clear"),
        ({"train__zero_grad_set_to_none": False}, IN_GRAPHS, "there is nothing to clear"),
        (
            {"train__dist__gradient_reduction": "flat"},
            IN_GRAPHS,
            "Leave the setting at auto, or run with graph.enabled=false.",
        ),
        (
            {"momentum_scheduler": object()},
            IN_GRAPHS,
            "contains the momentum as a constant. Remove it",
        ),
        (
            {"train__deterministic": True},
            ON_CUDA,
            "deterministic CUDA kernels. Remove it, or run with",
        ),
        ({"graph__on_build_error": "eager"}, EAGERLY, "graph.enabled=true or auto"),
        ({"train__rehearse": 2}, [], ""),
        # the modes are compared only in float32, which AMP does not change on CPU
        (
            {"train__rehearse": 2, "train__amp__enabled": "auto"},
            ON_CUDA,
            "Compare with train.amp.enabled=false.",
        ),
        ({"train__rehearse_every": 2, "train__amp__enabled": "auto"}, ON_CUDA, "cannot be"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(settings, where, text):
    for mode, device in EVERYWHERE:
        run = make_run(mode, **settings)
        if (mode, device) not in where:
            check_supported(run, mode, device)
            continue
        with pytest.raises(UserError) as caught:
            check_supported(run, mode, device)
        assert text in str(caught.value)
