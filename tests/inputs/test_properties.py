"""Any override gives a valid config or one clear error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai.config import ConfigError, LazyCall, LazyConfig, defaults, validate
from libai.config.settings.coercion import OBJECTS
from libai.config.settings.schema import all_paths

pytestmark = pytest.mark.e2e


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


# the same examples in every run, however slow the machine
@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
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
