"""What the trainer adds to an iteration: the loop of a run against hand-written OneFlow loops, in microseconds.

A 4 x 4 linear layer, so that almost nothing but the loop is left (`--width 420` makes steps of about 5 ms). Loops are
interleaved in blocks of `--iters` iterations within one process, which finds differences of microseconds that processes
of their own would not show, and each is compared with the raw loop of the same round. `wall` is the clock, with the
device's work and all that else runs on the machine; `host` is processor time of the loop's thread, which a busy machine
disturbs less:

    raw         batch to tensors, forward, backward, update, clear, step the schedule (graph: one call, schedule inside)
    raw+sync    the same, and reads the loss in every iteration
    ours        a `Run` with its default hooks; with `--log-period N` also a log point every N iterations
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: more iterations than any measurement makes
ENDLESS = 10**9
Micros = dict[str, list[float]]
Step = Callable[..., Any]


def run(arguments: Sequence[str]) -> int:
    """Run one command line of tools/overhead.py; returns the exit code."""
    args = _parse(arguments)
    if args.mode == "both":  # each in a process of its own: the environment of the two differs
        rest = [word for word in arguments if word != "both" and not word.startswith("--mode")]
        command = [sys.executable, sys.argv[0], *rest]
        return max(subprocess.run([*command, "--mode", mode]).returncode for mode in ("eager", "graph"))
    if args.mode == "eager":  # before oneflow is imported, as tools/train.sh sets it
        os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # what a run says
        clocks = measure(args.mode, args.rounds, args.iters, args.log_period or ENDLESS, Path(folder), args.width)
    print(json.dumps({"mode": args.mode, **clocks}) if args.json else describe(args.mode, clocks), flush=True)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="overhead.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("eager", "graph", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each loop (default 15)")
    parser.add_argument("--iters", type=int, default=300, help="iterations of one block (default 300)")
    parser.add_argument("--width", type=int, default=4, help="of the layer, and samples in a batch (default 4)")
    parser.add_argument("--log-period", type=int, default=0, help="log so often; 0 never (default), a config has 20")
    parser.add_argument("--json", action="store_true", help="one JSON object per mode")
    return parser.parse_args(arguments)


def toy_data(width: int) -> list[dict[str, Any]]:
    """Eight batches of `width` samples."""
    import numpy as np

    rng = np.random.RandomState(0)
    return [{name: rng.randn(width, width).astype(np.float32) for name in "xy"} for _ in range(8)]


def toy_model(width: int) -> Any:
    """A linear layer with a squared loss, as the model contract wants it."""
    import oneflow as flow
    from oneflow import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Any, y: Any) -> Any:
            return {"losses": {"square": flow.mean(flow.square(self.linear(x) - y))}}

    flow.manual_seed(0)
    return Model()


class Blocks:
    """The trainer's loader, which measures: between two blocks of the trainer's loop the other loops run theirs.

    So the loop is never left: leaving and entering it has costs of its own. `others`: name → a function that runs one
    block. Fills `wall` and `host`: loop → microseconds per iteration, one number for each round. The first round, which
    compiles and allocates, is dropped.
    """

    def __init__(self, rounds: int, iters: int, width: int):
        self.rounds, self.iters, self.width = rounds, iters, width
        self.others: dict[str, Callable[[], None]] = {}
        self.wall: Micros = {}
        self.host: Micros = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from libai.oneflow_fixes.threads import usual_thread_switches

        batches = toy_data(self.width)
        for number in range(self.rounds + 1):
            with usual_thread_switches():
                for name in list(self.others)[:: 1 if number % 2 else -1]:
                    with self._timed(name, number):
                        self.others[name]()
            with self._timed("ours", number):
                for index in range(self.iters):
                    yield batches[index % len(batches)]
        yield batches[0]

    @contextlib.contextmanager
    def _timed(self, name: str, number: int) -> Iterator[None]:
        from libai.oneflow_fixes.internals import wait_for_device

        wall, host = time.perf_counter(), time.thread_time()
        yield
        spent = time.thread_time() - host
        wait_for_device()
        if number:
            self.wall.setdefault(name, []).append((time.perf_counter() - wall) / self.iters * 1e6)
            self.host.setdefault(name, []).append(spent / self.iters * 1e6)


def _raw_eager(width: int) -> Step:
    """An update as a careful user writes it in eager mode."""
    import oneflow as flow

    from libai.scheduler import WarmupCosineLR

    model = toy_model(width)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    schedule = WarmupCosineLR(optimizer, max_iter=ENDLESS, warmup_iter=10)

    def step(x: Any, y: Any) -> Any:
        loss = model(x=x, y=y)["losses"]["square"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        return loss

    return step


def _raw_graph(width: int) -> Step:
    """The same as a hand-written graph, whose schedule is compiled too."""
    import oneflow as flow
    from oneflow import nn

    from libai.oneflow_fixes.launch_race import protect_graph_launches

    model = toy_model(width)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    schedule = flow.optim.lr_scheduler.CosineDecayLR(optimizer, decay_steps=10**6)

    class Update(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer, lr_sch=schedule)

        def build(self, x: Any, y: Any) -> Any:
            loss = self.model(x, y)["losses"]["square"]
            loss.backward()
            return loss

    step = Update()
    with protect_graph_launches():  # OneFlow may crash on tiny graphs (docs/decisions/0006-graph-launch-race.md)
        step(*map(flow.from_numpy, toy_data(width)[0].values()))
    return step


def _raw_block(step: Step, iters: int, width: int, reads_loss: bool) -> Callable[[], None]:
    import oneflow as flow

    batches = toy_data(width)

    def block() -> None:
        for index in range(iters):
            batch = batches[index % len(batches)]
            loss = step(flow.from_numpy(batch["x"]), flow.from_numpy(batch["y"]))
            if reads_loss:
                loss.item()

    return block


def measure(mode: str, rounds: int, iters: int, log_period: int, folder: Path, width: int = 4) -> dict[str, Micros]:
    """`{"wall": ..., "host": ...}`: microseconds per iteration of `raw`, `raw+sync` and `ours` in each round.

    `ours` is a `Run` with the hooks of a default run (no checkpoint is due) that writes into `folder`.
    """
    import oneflow as flow
    from omegaconf import OmegaConf

    from libai.config import LazyCall, defaults, validate
    from libai.engine import Run, default_setup

    train, graph = defaults("train"), defaults("graph")
    num_iters = (rounds + 1) * iters + 1  # the loader is asked once more, which ends the last block
    train.update(output_dir=str(folder), train_micro_batch_size=width, train_iter=num_iters, log_period=log_period)
    train.checkpointer.update(period=ENDLESS, save_on_exit=False)
    graph.enabled = mode == "graph"
    config = {
        "model": LazyCall(toy_model)(width=width),
        "optim": LazyCall(flow.optim.SGD)(lr=0.01),
        "lr_scheduler": LazyCall("libai.scheduler.WarmupCosineLR")(max_iter=ENDLESS, warmup_iter=10),
        "dataloader": {"train": LazyCall(Blocks)(rounds=rounds, iters=iters, width=width)},
        "train": train,
        "graph": graph,
    }
    run = Run(default_setup(validate(OmegaConf.create(config, flags={"allow_objects": True}))))
    step = _raw_graph if mode == "graph" else _raw_eager
    blocks = run.train_loader
    for name in ("raw", "raw+sync"):
        blocks.others[name] = _raw_block(step(width), iters, width, name != "raw")
    run.train()
    return {"wall": blocks.wall, "host": blocks.host}


def describe(mode: str, clocks: dict[str, Micros]) -> str:
    """A table: each loop's median, and its difference to the raw loop of the same round with the middle 80 %."""
    rounds = len(clocks["wall"]["raw"])
    lines = [f"{mode}: microseconds per iteration, {rounds} rounds; over raw: median [middle 80 %]"]
    for clock, micros in clocks.items():
        for name, values in micros.items():
            line = f"  {clock} {name:<9} {statistics.median(values):8.1f}  (min {min(values):.1f})"
            differences = sorted(value - raw for value, raw in zip(values, micros["raw"]))
            cut = len(differences) // 10
            spread = f"[{differences[cut]:+.1f} ... {differences[-1 - cut]:+.1f}]"
            if name != "raw":
                middle = statistics.median(differences)
                line += f"   over raw {middle:+7.1f} {spread}  {middle / statistics.median(micros['raw']):+.1%}"
            lines.append(line)
    return "\n".join(lines)
