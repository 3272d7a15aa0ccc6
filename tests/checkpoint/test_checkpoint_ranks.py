"""Two real ranks: every layout is gathered to full tensors and restored, and failures reach both
ranks.
"""

import numpy as np
import pytest
from jobs import run_ranks

from libai import checkpoint

_JOB = """
import os, sys, threading, traceback

def main(root):
    import numpy as np
    import oneflow as flow
    from libai import checkpoint
    from libai.checkpoint import background, saving
    from libai.utils.distributed import get_rank

    B, S = flow.sbp.broadcast, flow.sbp.split
    both, first, second = (flow.placement("cpu", ranks) for ranks in ([0, 1], [0], [1]))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    layouts = {"broadcast": (both, B), "rows": (both, S(0)), "columns": (both, S(1)), "stage 0": (first, B),
               "stage 1": (second, B), "sum": (both, flow.sbp.partial_sum)}
    tensors = {name: flow.tensor(x, placement=p, sbp=s) for name, (p, s) in layouts.items()}
    tensors["local"] = flow.tensor(x + get_rank())  # taken from rank 0

    path = checkpoint.save(root, 1, {"model": tensors}, {"rank": get_rank()}, shard_bytes=600)
    background._MAX_WAITING_BYTES = 300  # wait in the middle, as with a large model
    write, waiting = background.write_checkpoint, threading.Event()
    background.write_checkpoint = lambda *arguments: waiting.wait(30) and write(*arguments)
    checkpointer = checkpoint.AsyncCheckpointer(root)
    changing = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpointer.save(2, {"model": changing}, {})
    for tensor in changing.values():  # training goes on while the write has not even begun
        tensor.zero_()
    assert all((tensor.numpy() == 0).all() for tensor in changing.values())
    waiting.set()
    checkpointer.close()

    module = flow.nn.Module()
    for name, (placement, sbp) in layouts.items():
        if name != "sum":
            zero = flow.zeros(8, 8, placement=placement, sbp=sbp)
            module.register_parameter(name.replace(" ", ""), flow.nn.Parameter(zero))
    kept = dict(module.named_parameters())
    loaded = checkpoint.load(path).tensors["model"]
    checkpoint.load_weights({name.replace(" ", ""): loaded[name] for name in layouts if name != "sum"}, module)
    for name, parameter in module.named_parameters():
        assert parameter is kept[name] and parameter.sbp == kept[name].sbp
    checkpoint.save(root, 3, {"model": module.state_dict()}, {})

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    write_tensors, saving.write_tensors = saving.write_tensors, fail
    # the first of several files fails, so that the other rank waits in the gathers of the others
    in_shards = lambda: checkpoint.save(root, 4, {"model": tensors}, {}, shard_bytes=600)
    for save in (in_shards, lambda: _save_in_background(root, tensors)):
        try:
            save()
        except checkpoint.CheckpointError as error:
            print(f"rank {get_rank()} was told: {error}", flush=True)
    saving.write_tensors = write_tensors
    checkpoint.save(root, 5, {"model": tensors}, {})  # the ranks still agree

def _save_in_background(root, tensors):
    from libai import checkpoint
    checkpointer = checkpoint.AsyncCheckpointer(root)
    checkpointer.save(4, {"model": tensors}, {})
    checkpointer.close()

try:
    main(sys.argv[1])
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # a rank that merely raises hangs the job (OneFlow 0.9.0)
"""  # noqa: E501


@pytest.mark.e2e
@pytest.mark.launch
def test_two_ranks_save_logical_tensors_and_agree_on_failures(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(_JOB)
    root = tmp_path / "root"
    output = run_ranks(job, 2, root, cwd=tmp_path, timeout=100, PYTHONUNBUFFERED="1").stdout
    expected = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert [checkpoint.iteration_of(path.name) for path in checkpoint.list_checkpoints(root)] == [
        1,
        2,
        3,
        5,
    ]
    for path in checkpoint.list_checkpoints(root):
        loaded = checkpoint.load(path)
        assert checkpoint.verify(path) == []
        for name, array in loaded.tensors["model"].items():
            assert np.array_equal(array, expected), f"{path.name}: {name}"
    assert checkpoint.load(root / "iter_0000001").state == {"rank": 0}
    for rank in (0, 1):
        assert output.count(f"rank {rank} was told: checkpoint iter_0000004") == 2
    assert "No space left on device" in output
