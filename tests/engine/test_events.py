import json
import math

import oneflow as flow
import pytest
from refusals import refused

from libai.engine.events.storage import EventStorage


def test_a_tensor_of_several_elements_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'logits' is a tensor of shape \(3,\).*mean\(\)"):
        EventStorage().put_scalar("logits", flow.ones(3))


def test_a_tensor_of_a_graph_under_construction_is_an_error_with_a_remedy():
    class Graph(flow.nn.Graph):
        def build(self, x):
            EventStorage().put_scalar("aux", x.sum())
            return x

    with refused(
        r"'aux' was put from inside a compiled graph.*\"metrics\": \{'aux': value\}",
    ):
        Graph()(flow.ones(2))


def test_a_value_that_is_not_a_number_is_refused_immediately():
    with pytest.raises(TypeError, match="'a'.* takes a number or a one-element tensor, not str"):
        EventStorage().put_scalar("a", "0.5")


def test_state_survives_json():
    storage = EventStorage(7)
    storage.put_scalars(loss=flow.tensor(0.25), time=0.5, broken=math.nan)
    restored = EventStorage()
    restored.load_state_dict(json.loads(json.dumps(storage.state_dict(), allow_nan=False)))
    assert restored.latest() == {"loss": (0.25, 7), "time": (0.5, 7)}
    restored.put_scalars(time=1.0, loss=2.0)
    assert restored.latest() == {"time": (1.0, 7), "loss": (2.0, 7)}
    assert [*restored.latest()] == ["time", "loss"], (
        "the names are in the order in which they were put"
    )
