import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai.config import BatchSizes, ConfigError, solve_batch_sizes, solve_data_parallel_size

sizes = st.integers(1, 50)


@given(sizes, sizes, sizes)
def test_any_two_sides_give_the_third(micro, steps, ranks):
    whole = BatchSizes(micro, steps, micro * steps * ranks)
    assert solve_batch_sizes(micro, whole.global_, None, ranks) == whole
    assert solve_batch_sizes(micro, None, steps, ranks) == whole
    assert solve_batch_sizes(None, whole.global_, steps, ranks) == whole
    assert solve_batch_sizes(micro, whole.global_, steps, ranks) == whole


def test_accumulation_defaults_to_one():
    assert solve_batch_sizes(4, None, None, 2) == BatchSizes(4, 1, 8)
    assert solve_batch_sizes(None, 8, None, 2) == BatchSizes(4, 1, 8)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            (4, 30, None, 2),
            "train.global_batch_size=30 is not a multiple of micro-batch × data-parallel ranks = "
            "4 × 2. Nearest: 24, 32.",
        ),
        (
            (4, 3, None, 2),
            "train.global_batch_size=3 is not a multiple of micro-batch × data-parallel ranks = "
            "4 × 2. Nearest: 8.",
        ),
        (
            (None, 9, 2, 2),
            "train.global_batch_size=9 is not a multiple of accumulation × data-parallel ranks = "
            "2 × 2. Nearest: 8, 12.",
        ),
        (
            (4, 32, 3, 2),
            "train.global_batch_size=32 is not micro-batch × accumulation × data-parallel ranks "
            "= 4 × 3 × 2 = 24. Set train.num_accumulation_steps=4 or train.global_batch_size=24, "
            "or leave one of them null.",
        ),
        (
            (None, None, 2, 1),
            "No batch size is set. Set train.train_micro_batch_size (samples per rank and "
            "forward pass) or train.global_batch_size (samples per iteration).",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_explained(arguments, text):
    with pytest.raises(ConfigError) as caught:
        solve_batch_sizes(*arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            (4, None, 3, 1),
            "= 3 does not divide the 4 processes of this run. Set their product to 1, 2, 4",
        ),
        (
            (4, 2, 1, 1),
            "= 2, but the number of processes is 4. Set train.dist.data_parallel_size=4",
        ),
        ((3, 2, 2, 1), "= 4, but the number of processes is 3. Change train.dist, or start 4."),
    ],
)
def test_a_mesh_that_does_not_fit_is_explained(arguments, text):
    with pytest.raises(ConfigError, match=text):
        solve_data_parallel_size(*arguments)
