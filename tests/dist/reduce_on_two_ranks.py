"""The guarantees of `libai.parallel.data_parallel` for unusual models, on two ranks. Started by
test_data_parallel.py."""

from __future__ import annotations

from libai.utils.distributed import all_reduce, get_rank


def ragged_model():
    """Return a model with parameters of two dtypes, a 0-dim and a frozen parameter, unequal on the
    ranks.
    """
    import oneflow as flow
    from oneflow import nn

    flow.manual_seed(get_rank())
    model = nn.Module()
    model.layer, model.rare = nn.Linear(4, 3), nn.Linear(2, 2)
    model.scale = nn.Parameter(flow.tensor(2.0 + get_rank()))
    model.wide = nn.Linear(3, 3).to(flow.float64)
    model.layer.bias.requires_grad_(False)
    return model


def check_means_of_what_each_rank_reaches(bucket_bytes):
    """`rare` is reached by no rank, then only by rank 1. `layer.bias` is unfrozen on the way."""
    import numpy as np
    import oneflow as flow

    from libai.parallel.data_parallel import FlatReduction

    model = ragged_model()
    reduction = FlatReduction(model, bucket_bytes=bucket_bytes)
    for iteration in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        model.layer.bias.requires_grad_(iteration == 1)
        total = model.layer(flow.ones(2, 4) * (get_rank() + 1)).sum() * model.scale
        total = total + model.wide(flow.ones(1, 3).to(flow.float64)).sum().to(flow.float32) * (
            get_rank() + 1
        )
        if iteration == 1 and get_rank() == 1:
            total = total + model.rare(flow.ones(1, 2)).sum()
        total.backward()
        here = {
            n: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy()
            for n, p in model.named_parameters()
        }
        reduction.reduce()
        for name, parameter in model.named_parameters():
            mean = all_reduce(here[name]) / 2
            assert (parameter.grad is None) == (
                iteration == 0 and name.startswith(("rare", "layer.bias"))
            ), name
            if parameter.grad is not None:
                assert parameter.grad.dtype == parameter.dtype
                np.testing.assert_allclose(parameter.grad.numpy(), mean, rtol=1e-6)


def check_unequal_models_are_refused_everywhere():
    from oneflow import nn

    from libai.parallel import Mesh, ParallelPlan, parallelize
    from libai.parallel.data_parallel import require_equal_modules
    from libai.utils.errors import UserError

    require_equal_modules(nn.Linear(2, 3))
    for model in (
        nn.Linear(2, 3 + get_rank()),
        nn.Sequential(*[nn.Linear(1, 1) for _ in range(1 + get_rank())]),
    ):
        try:
            parallelize(model, ParallelPlan(), Mesh.of_this_job("cpu"))
        except UserError as error:
            assert "rank 0 has" in str(error) and "rank 1 has" in str(error), error
        else:
            raise AssertionError("unequal models were accepted")


def main() -> None:
    for bucket_bytes in (64, 2**20):
        check_means_of_what_each_rank_reaches(bucket_bytes)
    check_unequal_models_are_refused_everywhere()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main)
