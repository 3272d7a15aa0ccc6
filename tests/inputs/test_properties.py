"""Properties that hold for random inputs: overrides, samplers, batches, retention, files, names."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai.config import ConfigError, LazyCall, LazyConfig, defaults, validate
from libai.config.settings.coercion import OBJECTS
from libai.config.settings.schema import all_paths
from libai.data.sampling import DataLayout, SampleStream

pytestmark = pytest.mark.e2e


def drawn(count):
    """The same `count` examples in every run, however slow the machine."""
    checks = [
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ]
    return settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=count,
        suppress_health_check=checks,
    )


# ----------------------------------------------------------------------------------------------
# overrides


class Net:
    """Stands for a model."""

    def __init__(self, width: int = 4, rates=(0.1, 0.2), inner=None, name: str = "net"):
        pass


def config():
    sections = {
        "model": LazyCall(Net)(width=8, inner=LazyCall(Net)()),
        "optim": LazyCall(Net)(rates=[0.1, 0.2]),
        "dataloader": {"train": LazyCall(Net)(), "test": {"val": LazyCall(Net)()}},
        "train": defaults("train"),
        "graph": defaults("graph"),
    }
    cfg = OmegaConf.create(sections, flags=OBJECTS)
    cfg.train.train_iter, cfg.train.train_micro_batch_size = 10, 4
    return cfg


CONFIG = config()
KEYS = st.sampled_from(
    [*all_paths(), "model.width", "model.inner.rates", "optim.rates.0", "dataloader.test.val.name"]
)
NUMBERS = st.one_of(st.integers(), st.floats()).map(str)
WORDS = st.sampled_from(
    ["null", "true", "off", "auto", "cpu", "abc", "???", "1e30", "[]", "{}", "''", "${train.seed}"]
)
JUNK = st.text(st.sampled_from(list("abz019.,=+~-_ []{}'\"$:\\/@#()\t\n\0éß\u2028")), max_size=12)
VALUES = st.recursive(
    NUMBERS | WORDS | JUNK,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(
            st.sampled_from(["enabled", "_target_", "a", "width"]), inner, max_size=2
        ).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=4,
)


@st.composite
def mutated(draw):
    """A sound line with one character removed, doubled or replaced."""
    line = f"{draw(KEYS)}={draw(NUMBERS | WORDS)}"
    at = draw(st.integers(0, len(line) - 1))
    put = draw(st.sampled_from(["", line[at] * 2, "=", ".", ",", "[", "'", "x", "0", "-", " "]))
    return line[:at] + put + line[at + 1 :]


LINES = st.one_of(
    mutated(),
    JUNK,
    st.builds(
        lambda sign, key, value: f"{sign}{key}={value}",
        st.sampled_from(["", "+", "++", "~"]),
        KEYS,
        VALUES,
    ),
    KEYS.map(lambda key: f"~{key}"),
)


@drawn(250)
@given(st.lists(LINES, min_size=1, max_size=1))
@example([".model={}"])
@example(["train.seed={^(: 1}"])
def test_any_override_gives_a_valid_config_or_one_clear_error(lines):
    try:
        run = validate(LazyConfig.apply_overrides(CONFIG, lines))
    except ConfigError as error:
        assert error.problems and all(problem.strip() for problem in error.problems)
    else:
        assert validate(run.to_config()) == run


# ----------------------------------------------------------------------------------------------
# samples and batches


@drawn(150)
@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(0, 9),
)
def test_each_sample_comes_once_per_epoch_on_any_ranks_from_any_point(
    samples, micro, ranks, seed, shuffle, resumed
):
    def visits(first_step, num_steps):
        """The samples of all ranks in the order of the stream, read by streams that know of nothing
        before.
        """
        found = []
        for step in range(first_step, first_step + num_steps):
            for rank in range(ranks):
                layout = DataLayout(micro, rank, ranks)
                start, stop = layout.slice_of_step(step * layout.samples_per_step)
                found += (
                    SampleStream(samples, seed=seed, shuffle=shuffle).indices(start, stop).tolist()
                )
        return found

    steps = -(-2 * samples // (micro * ranks))
    whole = visits(0, steps)
    for epoch in range(2):
        assert sorted(whole[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    resumed = min(resumed, steps)
    assert visits(resumed, steps - resumed) == whole[resumed * micro * ranks :]
    one_rank = SampleStream(samples, seed=seed, shuffle=shuffle).indices(0, 2 * samples)
    assert whole[: 2 * samples] == one_rank.tolist()
