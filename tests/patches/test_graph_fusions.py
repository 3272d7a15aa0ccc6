"""A compiled step with fused updates and additions equals OneFlow's step bit for bit."""

from collections import Counter
from itertools import product

import oneflow as flow
import pytest
from marks import nightly_but
from numpy.testing import assert_allclose
from toy import LateReader, are_equal, batches, flat_weights, make_trainer, weights_of

from libai.patches.job.job_edit import JobEdit

OPTIMIZERS = {
    "sgd": ("sgd", lambda p: flow.optim.SGD(p, lr=0.1)),
    "sgd, decay": ("sgd", lambda p: flow.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "momentum": ("momentum", lambda p: flow.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2)),
    "momentum, decay": (
        "momentum",
        lambda p: flow.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": ("momentum", lambda p: flow.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adam, decay": ("adam", lambda p: flow.optim.Adam(p, lr=1e-2, weight_decay=0.1)),
    "adamw": ("adam", lambda p: flow.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "no correction": ("adam", lambda p: flow.optim.AdamW(p, lr=1e-2, do_bias_correction=False)),
}


pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("library")]


def trained(build, max_norm=0.05, accumulation=1):
    """Return (weights, number of operations of each kind) after 6 updates of a model with two
    groups.
    """

    def optimizer(model):
        matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        return build([{"params": matrices}, {"params": biases, "lr": 0.03}])

    options = {"max_grad_norm": max_norm, "num_accumulation_steps": accumulation}
    trainer = make_trainer("graph", batches(6), optimizer=optimizer, **options)
    trainer.train(0, 6)
    job = JobEdit(trainer.graph._full_job_proto)
    return weights_of(trainer), Counter(job.kind(op) for op in job.ops.values())


#: name of the optimizer, bound of the norm, accumulation
CASES = list(product(OPTIMIZERS, [None, 0.05], [1, 2]))


@pytest.mark.filterwarnings("ignore:Only Momentum")
@pytest.mark.parametrize("case", nightly_but(CASES, *CASES[::3]), ids=str)
def test_weights_are_those_of_single_updates(case, monkeypatch):
    name, max_norm, accumulation = case
    kind, build = OPTIMIZERS[name]
    found, ops = trained(build, max_norm, accumulation)
    assert (ops[f"multi_tensor_{kind}_update"], ops[f"{kind}_update"]) == (2, 0)
    assert (
        ops["scalar_mul_by_tensor"] == ops["l1_l2_regularize_gradient"] == ops["broadcast_add"] == 0
    )
    monkeypatch.setenv("LIBAI_PATCHES", "-fused-operations")
    expected, ops = trained(build, max_norm, accumulation)
    assert ops["l1_l2_regularize_gradient"] == (4 if "decay" in name else 0)
    assert (ops[f"multi_tensor_{kind}_update"], ops[f"{kind}_update"]) == (0, 4)
    assert are_equal(found, expected)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_joined_update_waits_for_all_who_read_its_weights(accumulation):
    def optimizer(model):
        first = list(model.a.parameters()) + list(model.b.parameters())
        return flow.optim.SGD([{"params": first}, {"params": [model.v], "lr": 0.3}], lr=0.1)

    def weights(mode):
        options = {"optimizer": optimizer, "num_accumulation_steps": accumulation}
        trainer = make_trainer(mode, batches(6), LateReader, **options)
        trainer.train(0, 6)
        return flat_weights(trainer.model)

    assert_allclose(weights("graph"), weights("eager"), rtol=1e-5, atol=1e-6)


def test_the_comparison_would_see_another_bound():
    """Negative control: the comparison detects a clip norm that differs by 2 %."""
    build = OPTIMIZERS["sgd"][1]
    assert not are_equal(trained(build, 0.05)[0], trained(build, 0.051)[0])


def test_oneflows_own_kernels_get_single_updates_and_additions(kernels_off):
    _, ops = trained(OPTIMIZERS["adamw"][1])
    assert ops["adam_update"] == ops["scalar_mul_by_tensor"] == 4
    assert ops["broadcast_add"] == 2
