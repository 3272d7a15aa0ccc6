"""The graph trainer beyond the common contract: shapes, state in place, build errors."""

import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from toy import Classifier, Tagger, are_equal, batches, losses_of, make_trainer, weights_of

from libai.utils.errors import GraphBuildError


def run(mode, data, iterations, accumulation=1, **options):
    options["num_accumulation_steps"] = accumulation
    trainer = make_trainer(mode, data, Tagger, **options)
    return losses_of(trainer, iterations), trainer


RAGGED = batches(4, 8, ignored=0.4) + batches(2, 6, seed=1) + batches(6, 8, ignored=0.4, seed=2)
LISTS = [{"x": batch["x"], "y": batch["y"].tolist()} for batch in RAGGED]


@pytest.mark.parametrize(
    "accumulation, data",
    [
        (1, RAGGED),
        (2, RAGGED),
        (1, LISTS),
        (2, LISTS),
        (2, batches(1, 8) + batches(1, 6) + RAGGED[6:]),
    ],
)
def test_a_batch_of_another_shape_gives_the_eager_update(accumulation, data):
    count = len(data) // accumulation
    expected, eager = run("eager", data, count, accumulation, max_grad_norm=0.5)
    losses, graph = run("graph", data, count, accumulation, max_grad_norm=0.5)
    assert_allclose(losses, expected, rtol=1e-6)
    for p, q in zip(eager.model.parameters(), graph.model.parameters()):
        assert_allclose(q.numpy(), p.numpy(), rtol=1e-5, atol=1e-6)


class Branching(Classifier):
    def forward(self, x, y):
        if x.sum() > 0:  # the planted fault
            x = x * 2.0
        return super().forward(x, y)


class Masking(Classifier):
    def forward(self, x, y):
        return Classifier.forward(self, x * x[x > 0].mean(), y)


@pytest.mark.parametrize("model, text", [
    (Branching, r"test_graph_trainer.py.*if x.sum\(\) > 0.*flow.where"),
    (Masking, r"test_graph_trainer.py.*x\[x > 0\].*mask"),
])  # fmt: skip
def test_a_build_error_names_the_users_line_and_the_remedy(model, text, capfd):
    trainer = make_trainer("graph", model=model, num_accumulation_steps=2)
    before = weights_of(trainer)
    with pytest.raises(GraphBuildError, match=text):
        trainer.prepare()
    assert "[ERROR]" not in capfd.readouterr().out
    assert are_equal(weights_of(trainer), before)


class WithoutKernel(Classifier):
    def forward(self, x, y):
        return Classifier.forward(self, flow._C.fused_bias_add_gelu(x, x[0], axis=1), y)


def test_after_a_failed_compilation_another_model_compiles():
    trainer = make_trainer("graph", model=WithoutKernel)
    with pytest.raises(GraphBuildError, match="Cannot find the kernel"):
        trainer.prepare()
    run("graph", batches(2), 2)
