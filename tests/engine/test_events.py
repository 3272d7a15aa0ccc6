import json
import math
import threading

import numpy as np
import oneflow as flow
import pytest

from libai.engine.log.events import EventStorage, get_event_storage
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


def test_a_fetched_value_is_not_fetched_again():
    storage, tensor = EventStorage(), DeviceScalar()
    storage.put_scalar("a", tensor)
    assert storage.latest() == storage.latest() == {"a": (1.0, 0)}
    assert tensor.fetches == 1


def test_get_fetches_the_one_that_is_asked_for():
    storage, wanted, other = EventStorage(3), DeviceScalar(), DeviceScalar()
    storage.put_scalars(wanted=wanted, other=other)
    assert storage.get("wanted") == storage.get("wanted") == (1.0, 3)
    assert (wanted.fetches, other.fetches) == (1, 0)
    assert storage.get("absent") is None


def fetched(scalars):
    storage = EventStorage()
    storage.put_scalars(**scalars)
    return {name: value for name, (value, _) in storage.latest().items()}


def test_real_tensors_come_to_the_host_in_one_transfer(monkeypatch):
    tensors = {f"loss{i}": (flow.ones(2, 2) * i).sum() for i in range(4)}
    tensors["with_grad"] = (flow.ones(1, requires_grad=True) * 7).sum()
    tensors["one_element"] = flow.full((1, 1), 9.0)
    transfers, original = [], flow.Tensor.numpy
    monkeypatch.setattr(flow.Tensor, "numpy", lambda self: transfers.append(1) or original(self))
    assert fetched(tensors) == {f"loss{i}": 4.0 * i for i in range(4)} | {"with_grad": 7.0, "one_element": 9.0}
    assert len(transfers) == 1
    fetched({"count": flow.tensor(3, dtype=flow.int64), **tensors})
    assert len(transfers) == 3, "another dtype is another transfer"


def test_a_kept_loss_does_not_keep_its_graph():
    storage = EventStorage()
    storage.put_scalar("train/loss", (flow.ones(2, requires_grad=True) * 2).sum())
    kept, _ = storage._latest["train/loss"]
    assert not kept.requires_grad and storage.get("train/loss") == (4.0, 0)


def test_integers_on_the_device_stay_exact():
    big = 2**40 + 1
    scalars = {name: flow.tensor(big + i, dtype=flow.int64) for i, name in enumerate("ab")}
    assert fetched(scalars) == {"a": big, "b": big + 1}


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


@pytest.mark.parametrize("number", [1, 1.0, True, np.float32(1), np.float64(1), np.int64(1)])
def test_every_kind_of_number_becomes_a_float(number):
    storage = EventStorage()
    storage.put_scalar("a", number)
    value, _ = storage.latest()["a"]
    assert type(value) is float and value == 1.0


def test_what_is_no_number_is_refused_at_once():
    with pytest.raises(TypeError, match="'a'.* takes a number or a one-element tensor, not str"):
        EventStorage().put_scalar("a", "0.5")


def test_the_current_storage_is_the_innermost_one():
    with EventStorage() as outer:
        with EventStorage() as inner, inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer


def test_outside_of_training_there_is_no_storage():
    with pytest.raises(RuntimeError, match=r"outside of training.*with EventStorage\(\) as storage"):
        get_event_storage()


def test_the_storage_is_closed_by_an_error_too():
    with pytest.raises(ZeroDivisionError), EventStorage():
        _ = 1 / 0
    with pytest.raises(RuntimeError):
        get_event_storage()


def test_another_thread_has_no_storage_of_ours():
    caught = []

    def look():
        try:
            get_event_storage()
        except RuntimeError as error:
            caught.append(error)

    with EventStorage():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_iterations_advance_by_step_or_assignment():
    storage = EventStorage(10)
    storage.step()
    storage.put_scalar("a", 1.0)
    storage.iter = 20
    storage.put_scalar("b", 1.0)
    assert storage.latest() == {"a": (1.0, 11), "b": (1.0, 20)}


def test_texts_are_handed_out_once():
    storage = EventStorage(3)
    storage.put_text("config", "a: 1")
    assert storage.pop_texts() == [("config", "a: 1", 3)]
    assert storage.pop_texts() == []


def test_state_survives_json():
    storage = EventStorage(7)
    storage.put_scalars(loss=DeviceScalar(0.25), time=0.5, broken=math.nan)
    restored = EventStorage()
    restored.load_state_dict(json.loads(json.dumps(storage.state_dict(), allow_nan=False)))
    assert restored.iter == 7
    assert restored.latest() == {"loss": (0.25, 7), "time": (0.5, 7)}
