import dataclasses
import math

import pytest

from libai.config import defaults, schema
from libai.config.settings import sections
from libai.config.settings.coercion import Bounds


def test_every_key_has_a_doc_and_a_default_that_fits():
    for key in schema.settings():
        assert key.doc.endswith("."), key.path
        assert key.fit(key.default) == key.default, key.path


def test_every_section_is_frozen_and_documented():
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.Train().train_iter = 3
    assert sections.Dist.__doc__


def test_defaults_are_fresh_each_time():
    first = defaults("train")
    first.amp.enabled = True
    assert defaults("train").amp.enabled is False


def test_find_tells_settings_sections_and_nothing_apart():
    assert schema.find("train.amp") is sections.Amp
    setting = schema.find("train.ema.enabled")
    assert isinstance(setting, schema.Key) and setting.kind is bool
    assert schema.find("train.amp.enable") is None
    assert schema.find("train.seed.seed") is None
    assert schema.find("model") is None


def test_bounds_hold_numbers_only():
    bounds = Bounds(at_least=0, below=1)
    assert str(bounds) == ">= 0 and < 1"
    assert not bounds.broken_by(0) and not bounds.broken_by(None) and not bounds.broken_by(True)
    assert bounds.broken_by(1) and bounds.broken_by(-0.1) and bounds.broken_by(math.nan)
