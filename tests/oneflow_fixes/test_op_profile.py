"""What the operation profiler counts, where it puts it, and that it leaves no trace in training."""

from __future__ import annotations

import json
import subprocess
import sys

import jobs
import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.benchmark.profiling import operations
from libai.oneflow_fixes.op_profile import OpProfile, OpTime, OpTimer, profile_ops, summarize

TOOL = str(jobs.ROOT / "tools" / "profile_ops.py")


class Slow(flow.autograd.Function):
    """Twice the input, by a product with a large matrix in the backward pass only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        big = flow.ones(2048, 2048)
        flow._C.matmul(big, big)
        return grad * 2.0


def time_ops(function):
    timer = OpTimer()
    with timer.installed():
        function(timer)
    return {(op.phase, op.name): op for op in summarize(timer.seconds, 1)}


def test_every_call_is_counted_once_in_its_phase():
    w, x = flow.ones(8, 8, requires_grad=True), flow.ones(8, 8)

    def run(_):
        hidden = flow.matmul(x, w) + x
        (hidden * hidden).sum().backward()

    ops = time_ops(run)
    for name in ("matmul", "add", "mul", "sum"):
        assert ops["forward", name].calls == 1 and ops["backward", name].calls == 1, (name, ops.keys())


def test_the_backward_of_a_function_shows_what_is_slow_inside_it():
    x = flow.ones(16, 16, requires_grad=True)
    ops = time_ops(lambda _: Slow.apply(x * 1.0).sum().backward())
    inner = ops["backward", "matmul in Slow"]
    assert inner.calls == 1 and ("forward", "matmul in Slow") not in ops
    # what is inside does not count twice: 2 * 2048^3 operations, 0.1 s or more, against the Python around them
    assert inner.us > ops["backward", "Slow (Python)"].us > 0


def test_oneflow_is_as_before_afterwards():
    before = dict(vars(flow.Tensor)), dict(vars(flow._C)), flow.matmul, flow.autograd.Function.__dict__["apply"]
    with pytest.raises(ZeroDivisionError), OpTimer().installed():
        assert flow.matmul is not before[2] and flow._C.matmul is flow.matmul
        1 / 0  # noqa: B018
    assert (dict(vars(flow.Tensor)), dict(vars(flow._C)), flow.matmul) == before[:3]
    assert flow.autograd.Function.__dict__["apply"] is before[3]


def test_timed_training_equals_plain_training():
    def train(timed):
        flow.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1))
        optimizer = flow.optim.AdamW(model.parameters(), lr=0.1)
        x, timer = flow.randn(4, 6), OpTimer()
        for _ in range(3):
            if timed:
                with timer.installed():
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.numpy() for p in model.parameters()]

    for plain, timed in zip(train(False), train(True)):
        np.testing.assert_array_equal(plain, timed)


def test_parameters_keep_no_hooks():
    """Clearing a gradient returns its parameter; a hook on it in each update would fire ever more often."""
    linear, timer = nn.Linear(4, 4), OpTimer()
    optimizer = flow.optim.SGD(linear.parameters(), lr=0.1)
    with timer.installed():
        for _ in range(5):
            linear(flow.ones(2, 4)).sum().backward()
            optimizer.zero_grad(set_to_none=True)
    names = {phase: {name for p, name, _ in timer.seconds if p == phase} for phase in ("backward", "update")}
    assert "_zero_grad_" in names["update"] and "_zero_grad_" not in names["backward"]


def test_shapes_are_told_apart_and_medians_added_up():
    seconds = {("forward", "matmul", "a"): [1e-6, 3e-6, 900e-6], ("forward", "matmul", "b"): [5e-6] * 3}
    (together,) = summarize(seconds, 3)
    assert (together.calls, together.us) == (2.0, pytest.approx(8.0))
    apart = summarize(seconds, 3, with_shapes=True)
    assert [(op.shapes, op.us) for op in apart] == [("b", pytest.approx(5.0)), ("a", pytest.approx(3.0))]


def test_the_table_says_what_the_waiting_costs():
    ops = [OpTime("forward", "matmul", "", 2.0, 300.0), OpTime("update", "adam", "", 1.0, 100.0)]
    profile = OpProfile(ops, step_us=200.0, timed_step_us=500.0, empty_call_us=5.0, updates=4)
    assert profile.factor == pytest.approx(2.0)
    table = profile.table(1)
    assert "2.00 times" in table and "5.0 us of every call" in table and "1 others" in table
    assert json.loads(profile.to_json())["ops"][0]["us_per_call"] == pytest.approx(150.0)


def tool(*arguments, **options):
    return jobs.run([sys.executable, TOOL, *arguments], timeout=100, **options)


def test_the_tool_prints_one_json_object():
    result = tool("configs/mlp_digits.py", "train.train_micro_batch_size=4", "--updates", "1", "--json")
    assert result.returncode == 0, result
    assert json.loads(result.stdout)["updates"] == 1


def test_calls_are_described_so_that_others_can_make_them():
    x, timer = flow.ones(4, 2, requires_grad=True), OpTimer()
    with timer.installed():
        flow._C.matmul(x, flow.ones(3, 2), transpose_b=True)
    args, kwargs = timer.examples["matmul", "(4,2) (3,2)"]
    assert args == [{"shape": s, "dtype": "float32", "grad": g} for s, g in (([4, 2], True), ([3, 2], False))]
    assert kwargs == {"transpose_b": True}


def test_the_timer_of_operations_times_a_call_and_its_gradient():
    tensor = {"shape": [4, 2], "dtype": "float32", "grad": True}
    requests = [["matmul", phase, [tensor, tensor], {"transpose_b": True}, 2] for phase in ("forward", "backward")]
    requests += [["no_such_operation", "forward", [], {}, 1]]
    server = subprocess.run(
        [sys.executable, operations.__file__.replace("operations", "operation_timer"), "oneflow"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=100,
    )
    forward, backward, refused = map(json.loads, server.stdout.splitlines())
    assert forward > 0 and backward > 0 and "no_such_operation" in refused


def test_a_python_without_torch_is_one_error():
    result = tool("configs/mlp_digits.py", "--updates", "1", "--torch", "/bin/false")
    assert result.returncode == 2 and result.stderr.count("Name a Python that has PyTorch") == 1, result


#: the others need a download, minutes of preparation, or gigabytes
SMALL = sorted(p.stem for p in (jobs.ROOT / "configs").glob("*.py") if p.stem.endswith(("_digits", "_stdlib")))


@pytest.mark.parametrize("config", SMALL)
def test_every_small_shipped_config_can_be_profiled(config):
    profile = operations.profile_config(
        str(jobs.ROOT / "configs" / f"{config}.py"), ["train.train_micro_batch_size=4"], 1, False
    )
    assert {op.phase for op in profile.ops} == {"forward", "backward", "update"}
    assert profile.factor > 0


def test_a_profiled_training_has_the_learning_rates_of_its_run(monkeypatch):
    """`train.auto_scale_lr` is part of the training: half of the batch that the rates are for, half of the rates."""
    profiled = []
    monkeypatch.setattr(operations, "profile_ops", lambda trainer, *_, **__: profiled.append(trainer))
    for scaling in ([], ["train.auto_scale_lr={enabled: true, base_batch_size: 8}"]):
        overrides = ["lr_scheduler=null", "train.train_micro_batch_size=4", *scaling]
        operations.profile_config(str(jobs.ROOT / "configs" / "vit_digits.py"), overrides, 1, False)
    plain, scaled = ([group["lr"] for group in trainer.optimizer.param_groups] for trainer in profiled)
    assert scaled == pytest.approx([rate / 2 for rate in plain]) and all(plain)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["graph.enabled=true"], "no times of their own"),
        (["--updates", "0"], "--updates=0: at least 1"),
        (["train.trian_iter=3"], "did you mean"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_error(arguments, text):
    result = tool("configs/mlp_digits.py", *arguments)
    assert result.returncode == 2 and text.lower() in result.stderr.lower(), result
    assert "Traceback" not in result.stderr


def test_profile_ops_makes_the_updates_it_says():
    model, data = toy.Classifier(), toy.batches(20)
    trainer = toy.trainer_of("eager", model, [], toy.optimizer_of("adamw", model))
    profile = profile_ops(trainer, lambda: [data.pop()], num_updates=3)
    assert len(data) == 20 - 2 * (3 + 2) and profile.updates == 3
    assert trainer.optimizer._state["step"] == 2 * (3 + 2)
    update = {op.name: op.calls for op in profile.ops if op.phase == "update"}
    units = trainer.optimizer.param_groups if trainer.optimizer_state.updates.fits else list(model.parameters())
    assert update["dispatch_adam_update"] == len(units)
