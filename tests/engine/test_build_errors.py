"""OneFlow's errors for a forward with global tensors are explained in the user's terms."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import trainer_of

from libai.engine.compiled.build_errors import explain_build_error, raise_forward_error
from libai.utils.errors import UserError


def explained_forward(said):
    with pytest.raises(UserError) as raised:
        raise_forward_error(said, nn.Linear(3, 3), {"x": flow.zeros(2, 3)}, True)
    return str(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError : Only local tensors have 'device'. Please use '.placement' for global "
        "tensors.",
        "Got input tensors with inconsistent attributes!",
    ],
)
def test_a_tensor_on_only_one_rank_is_named_with_a_remedy(said):
    error = RuntimeError(f"\x1b[1mError\x1b[0m: {said}")
    for explained in (explained_forward(error), str(explain_build_error(error, nn.ReLU()))):
        assert "Register it as a buffer, or create it from another tensor" in explained
        assert "Change the sizes or arguments" not in explained
    assert "Register it as a buffer" not in explained_forward(
        RuntimeError("\x1b[1mError\x1b[0m: 3 vs 4")
    )
    with pytest.raises(RuntimeError) as raised:
        _ = flow.zeros(2).sbp
    assert "uses sbp or placement, but its tensors are local. Remove both" in explained_forward(
        raised.value
    )


def test_an_unsupported_layout_for_an_operation_is_explained():
    error = RuntimeError(
        "\x1b[1mError\x1b[0m: fill_8 has no maching sbp after flitering valid sbp list "
        "sbp_signature {"
    )
    explained = explained_forward(error)
    assert (
        "cannot be changed in place. Compute a new tensor (`h = h + 1` instead of `h += 1`)"
        in explained
    )


class _Scale(flow.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _TooMany(_Scale):
    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _Needs(_Scale):
    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.needs_input_grad[0] else None, None


class _NoGradient(nn.Module):
    """A model whose loss OneFlow cannot differentiate, which is not the fault of its batch."""

    def __init__(self, operation):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(flow.ones(4))
        self.operation = operation

    def forward(self, x):
        h = self.layer(x)
        return (self.operation(h, self.scale) ** 2).mean()


def test_a_tensor_kept_with_its_history_is_named(mode):
    class Recurrent(nn.Linear):
        kept = None

        def forward(self, x):
            self.kept = super().forward(x if self.kept is None else x + self.kept)
            return (self.kept**2).mean()

    model = Recurrent(4, 4)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(mode, model, [{"x": np.ones((8, 4), "float32")}], optimizer)
    with pytest.raises(UserError, match="earlier iteration, because forward keeps a tensor"):
        trainer.train(0, 3)


@pytest.mark.parametrize(
    "operation, remedy",
    [
        (_Scale.apply, "build_errors.py:.*: _Scale.backward.*returns None .*flow.zeros_like"),
        (_TooMany.apply, "build_errors.py:.*: _TooMany.backward.*one value for each input"),
        (
            lambda h, scale: _Needs.apply(h, scale.detach()),
            "build_errors.py:.*ctx.needs_input_grad.*Return the gradient of every input",
        ),
        (
            lambda h, scale: h.masked_fill((h > 0).to(flow.uint8), 0.0),
            "build_errors.py:.*a tensor is uint8.*Convert masks with `.bool..`",
        ),
        (
            lambda h, scale: _Scale.apply(h, 2.0),
            "build_errors.py:.*takes only tensors. Pass a number as a tensor",
        ),
        (
            lambda h, scale: h.index_add(0, flow.tensor([0, 1]), h[:2]),
            "OneFlow 0.9 has no gradient for this operation. Write it with other",
        ),
    ],
)
def test_a_missing_gradient_is_not_the_fault_of_the_batch(operation, remedy, mode):
    model = _NoGradient(operation)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(mode, model, [{"x": np.ones((8, 4), "float32")}], optimizer)
    with pytest.raises(UserError, match=f"(?s)_NoGradient.forward failed: .*{remedy}"):
        trainer.train(0, 1)
