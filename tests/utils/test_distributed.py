import json

import numpy as np
import pytest
from jobs import run_ranks
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


PROGRAM = """
import json, sys
import numpy as np
from libai.utils import distributed as d
from libai.utils.seeding import resolve_seed
rank, big = d.get_rank(), 2**53 + 1
found = {
    "sum": d.all_reduce(np.array([[0.1 + rank], [1.0]], dtype=np.float64)).tolist(),
    "float32": d.all_reduce(np.full(1, 1e-9 if rank else 1.0, np.float32)).tolist(),
    "int": d.all_reduce(np.array([big, rank])).tolist(),
    "scalar": d.all_reduce(np.float64(rank + 1)).tolist(),
    "empty": d.all_reduce(np.empty((0, 3))).shape,
    "from_0": d.broadcast_object({"rank": rank, "text": "é"}),
    "gathered": d.gather_objects([rank] * (1 + 5 * rank)),
    "any": [d.any_rank(rank == 1), d.any_rank(False)],
    "seed": resolve_seed(None),
}
for name, send in (("broadcast", lambda: d.broadcast_object({1, 2} if rank == 0 else 0)),
                   ("gather", lambda: d.gather_objects({1, 2} if rank == 1 else 0))):
    try:
        send()
    except TypeError as error:
        found[name + "_error"] = str(error)
d.barrier()
with open(f"{sys.argv[1]}/rank{rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return the results of two real processes."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    run_ranks(program, 2, folder, cwd=folder, timeout=120)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.e2e
@pytest.mark.launch
class TestTwoRanks:
    def test_sums_are_exact_in_float64_and_int64(self, two_ranks):
        big = 2**53 + 1
        for found in two_ranks:
            assert found["sum"] == [[0.1 + 1.1], [2.0]]
            assert found["int"] == [2 * big, 1]
            assert found["float32"] == [1.0 + float(np.float32(1e-9))]  # float32 would have lost it
            assert found["scalar"] == 3.0
            assert found["empty"] == [0, 3]

    def test_objects_arrive_on_every_rank(self, two_ranks):
        for found in two_ranks:
            assert found["from_0"] == {"rank": 0, "text": "é"}
            assert found["gathered"] == [[0], [1] * 6]

    def test_a_flag_of_one_rank_is_seen_by_all(self, two_ranks):
        assert all(found["any"] == [True, False] for found in two_ranks)

    def test_a_drawn_seed_is_shared(self, two_ranks):
        assert two_ranks[0]["seed"] == two_ranks[1]["seed"]

    def test_an_object_that_is_not_json_fails_on_every_rank_alike(self, two_ranks):
        """Negative control of the protocol: if only one rank raised, the other would wait
        forever.
        """
        assert "set" in two_ranks[0]["broadcast_error"]
        assert "rank 0 passed an object" in two_ranks[1]["broadcast_error"]
        assert "rank 1 passed an object" in two_ranks[0]["gather_error"]
        assert "set" in two_ranks[1]["gather_error"]
