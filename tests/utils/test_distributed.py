import numpy as np
import pytest
from refusals import refused

from libai.utils import distributed


@pytest.fixture
def alone(monkeypatch):
    """No launcher: a single process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_rank_facts_come_from_the_launcher(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    facts = (distributed.get_rank(), distributed.get_world_size(), distributed.get_local_rank())
    assert facts == (5, 8, 1)
    assert not distributed.is_main_process()


def test_a_broken_rank_variable_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "zero")
    with refused("RANK='zero' is not a whole number.*libai train"):
        distributed.get_rank()


def test_one_process_gets_its_own_values_back(alone):
    assert distributed.all_reduce(np.float32([1.5, 2])).tolist() == [1.5, 2]
    assert distributed.broadcast_object({"a": [1, None]}) == {"a": [1, None]}
    assert distributed.gather_objects("x") == ["x"]
    assert distributed.any_rank(True) and not distributed.any_rank(False)


def test_all_reduce_refuses_what_it_cannot_add(alone):
    with pytest.raises(TypeError, match="floats, integers or booleans, not dtype <U1"):
        distributed.all_reduce(np.array(["a"]))


def test_objects_that_are_not_json_are_refused_already_with_one_process(alone):
    for send in (distributed.broadcast_object, distributed.gather_objects):
        with pytest.raises(TypeError, match="only JSON values can be sent between ranks"):
            send({"array": np.ones(2)})


def test_a_rank_that_fails_since_rank_0_did_is_marked_for_the_launcher(monkeypatch):
    monkeypatch.setattr(distributed, "is_main_process", lambda: False)
    monkeypatch.setattr(
        distributed, "broadcast_object", lambda mine: [None, "the disk is full", False]
    )
    with pytest.raises(RuntimeError, match="the disk is full") as caught:
        distributed.result_of_rank_0(lambda: None)
    assert caught.value.is_consequence


class TestDevice:
    @pytest.fixture
    def machine(self, monkeypatch, alone):
        """Fake a machine with GPUs of the given compute capabilities."""
        flow = pytest.importorskip("oneflow")

        def pretend(*capabilities):
            monkeypatch.setattr(flow.cuda, "is_available", lambda: bool(capabilities))
            monkeypatch.setattr(flow.cuda, "device_count", lambda: len(capabilities))
            monkeypatch.setattr(flow.cuda, "get_device_capability", lambda i: capabilities[i])
            monkeypatch.setattr(flow.cuda, "get_device_name", lambda i: f"GPU of {capabilities[i]}")

        return pretend

    def test_auto_takes_the_gpu_that_is_there(self, machine):
        machine((8, 9))
        assert distributed.default_device() == "cuda"

    def test_auto_without_gpu_is_the_cpu(self, machine):
        machine()
        assert distributed.default_device("auto") == "cpu"

    def test_cuda_without_gpu_is_an_error(self, machine):
        machine()
        with refused(
            r"train.device=cuda is not possible: oneflow sees no usable GPU.*cpu or auto",
        ):
            distributed.default_device("cuda")

    def test_a_gpu_without_machine_code_is_not_taken(self, machine, caplog):
        machine((8, 0), (9, 0))
        with refused(r"GPU 1 .* has compute capability 9.0.*6.0 to 8.9"):
            distributed.default_device("cuda")
        assert distributed.default_device("auto") == "cpu"
        assert "compute capability 9.0" in caplog.text

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_more_ranks_than_gpus_is_an_error_for_every_device_setting(
        self, machine, monkeypatch, device
    ):
        machine((8, 0))
        monkeypatch.setenv("LOCAL_RANK", "1")
        with refused("local rank 1 needs its own GPU.*Start at most 1 processes"):
            distributed.default_device(device)
        assert distributed.default_device("cpu") == "cpu"

    def test_an_unknown_device_is_named(self):
        with refused("train.device='gpu' is not a device type"):
            distributed.default_device("gpu")
