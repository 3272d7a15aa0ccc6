import random
import resource

import numpy as np
import oneflow as flow

from libai.utils.seeding import MAX_SEED, raise_open_file_limit, resolve_seed, seed_everything


def _draw():
    return random.random(), np.random.rand(), flow.randn(2).numpy().tolist()


def test_one_seed_governs_all_three_generators():
    seed_everything(7)
    first = _draw()
    seed_everything(7)
    assert _draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(_draw(), first))


def test_an_offset_is_that_of_python_and_numpy_alone():
    seed_everything(10)
    ten = _draw()
    seed_everything(7)
    seven = _draw()
    assert seed_everything(7, offset=3) == 7
    assert _draw() == (*ten[:2], seven[2])
    seed_everything(2)
    two = _draw()
    seed_everything(MAX_SEED, offset=3)
    assert _draw()[:2] == two[:2]


def test_a_given_seed_is_kept_and_none_draws_one():
    assert resolve_seed(5) == 5
    drawn = {resolve_seed(None) for _ in range(5)}
    assert len(drawn) > 1 and all(0 <= seed <= MAX_SEED for seed in drawn)


def test_the_open_file_limit_is_raised_and_never_lowered():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        wanted = 512
        assert (
            raise_open_file_limit(wanted) == wanted == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        )
        assert raise_open_file_limit(100) == wanted
        if hard != resource.RLIM_INFINITY:
            assert raise_open_file_limit(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
