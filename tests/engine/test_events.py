import json
import math

import numpy as np
import oneflow as flow
import pytest

from libai.engine.events.storage import EventStorage, get_event_storage
from libai.utils.errors import UserError


class DeviceScalar:
    """A tensor whose fetches are counted."""

    def __init__(self, value=1.0, shape=()):
        self.value, self.shape, self.fetches = value, shape, 0

    def numpy(self):
        self.fetches += 1
        return np.float32(self.value)

    def _synchronises(self, *_):
        raise AssertionError("this would wait for the device")

    __float__ = __bool__ = item = __eq__ = _synchronises
    __hash__ = object.__hash__


def test_putting_a_tensor_never_fetches_it():
    storage, tensor = EventStorage(), DeviceScalar(0.5)
    with storage:
        for storage.iter in range(5):
            storage.put_scalar("train/loss", tensor)
            storage.put_scalars(**{"train/aux": tensor, "time": 0.1})
    assert tensor.fetches == 0
    assert storage.latest()["train/loss"] == (0.5, 4)
    assert tensor.fetches == 2  # negative control: asking does fetch, once per name


def test_a_tensor_of_several_elements_is_an_error_that_names_it():
    storage = EventStorage()
    storage.put_scalar("logits", flow.ones(3))
    with pytest.raises(ValueError, match=r"'logits' is a tensor of shape \(3,\).*mean\(\)"):
        storage.latest()


def test_a_tensor_of_a_graph_under_construction_is_an_error_that_says_what_to_do():
    storage, lazy = EventStorage(), DeviceScalar()
    lazy.is_lazy = True
    storage.put_scalar("aux", lazy)
    with pytest.raises(UserError, match=r"'aux' was put from inside a compiled graph.*\"metrics\": \{'aux': value\}"):
        storage.latest()


def test_what_is_no_number_is_refused_at_once():
    with pytest.raises(TypeError, match="'a'.* takes a number or a one-element tensor, not str"):
        EventStorage().put_scalar("a", "0.5")


def test_outside_of_training_there_is_no_storage():
    with pytest.raises(RuntimeError, match=r"outside of training.*with EventStorage\(\) as storage"):
        get_event_storage()


def test_state_survives_json():
    storage = EventStorage(7)
    storage.put_scalars(loss=DeviceScalar(0.25), time=0.5, broken=math.nan)
    restored = EventStorage()
    restored.load_state_dict(json.loads(json.dumps(storage.state_dict(), allow_nan=False)))
    assert restored.iter == 7
    assert restored.latest() == {"loss": (0.25, 7), "time": (0.5, 7)}
