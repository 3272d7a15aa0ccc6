"""What the trainer adds to an iteration: the loop of a run against hand-written OneFlow loops, in microseconds.

    python tools/overhead.py [--mode eager|graph|both] [--rounds 15] [--iters 300] [--width 4] [--log-period N] [--json]

A 4 x 4 linear layer, so that almost nothing but the loop is left (`--width 420` makes steps of about 5 ms). Loops take
turns in blocks of `--iters` iterations within one process, and each is compared with the raw loop of the same round,
which never reads its loss. `wall` is the clock, with the device's work and all that else runs on the machine; `host` is
processor time of the loop's thread, which a busy machine disturbs less:

    raw         batch to tensors, forward, backward, update, clear, step the schedule (graph: one call, schedule inside)
    raw+sync    the same, and reads the loss in every iteration
    ours        a `Run` with its default hooks; with `--log-period N` also a log point every N iterations

Other tools import `measure`. Nothing here checks that results are right: tests/parity does.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import libai  # noqa: F401  (finds the environment)

#: more iterations than any measurement makes
ENDLESS = 10**9
#: Python's default
PYTHON_SWITCH_SECONDS = 5e-3
Micros = dict[str, list[float]]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "graph", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=15, help="how often each loop gets its turn (default 15)")
    parser.add_argument("--iters", type=int, default=300, help="iterations of one turn (default 300)")
    parser.add_argument("--width", type=int, default=4, help="of the layer, and samples in a batch (default 4)")
    parser.add_argument("--log-period", type=int, default=0, help="log so often; 0 never (default), a config has 20")
    parser.add_argument("--json", action="store_true", help="one JSON object per mode")
    return parser.parse_args(arguments)


def toy_data(width: int = 4) -> list[dict[str, Any]]:
    """Eight batches of `width` samples."""
    import numpy as np

    rng = np.random.RandomState(0)
    make = lambda: rng.randn(width, width).astype(np.float32)  # noqa: E731
    return [{"x": make(), "y": make()} for _ in range(8)]


def toy_model(width: int = 4) -> Any:
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


class Turns:
    """The trainer's loader, which measures: between two turns of the trainer's loop the other loops get theirs.

    So the loop is never left: leaving and entering it has costs of its own. `others`: name → a function that runs one
    turn. Fills `wall` and `host`: loop → microseconds per iteration, one number for each round. The first round, which
    compiles and allocates, is dropped.
    """

    def __init__(self, rounds: int, iters: int, width: int = 4):
        self.rounds, self.iters, self.width = rounds, iters, width
        self.others: dict[str, Callable[[], None]] = {}
        self.wall: Micros = {}
        self.host: Micros = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = toy_data(self.width)
        for number in range(self.rounds + 1):
            names = list(self.others) if number % 2 else list(self.others)[::-1]
            ours = sys.getswitchinterval()
            sys.setswitchinterval(PYTHON_SWITCH_SECONDS)  # what a loop without our trainer has
            for name in names:
                start = _clocks()
                self.others[name]()
                self._note(number, name, start)
            sys.setswitchinterval(ours)
            start = _clocks()
            for index in range(self.iters):
                yield batches[index % len(batches)]
            self._note(number, "ours", start)
        yield batches[0]

    def _note(self, number: int, name: str, start: tuple[float, float]) -> None:
        import oneflow as flow

        host = time.thread_time()
        flow._oneflow_internal.eager.Sync()
        if number:
            self.wall.setdefault(name, []).append((time.perf_counter() - start[0]) / self.iters * 1e6)
            self.host.setdefault(name, []).append((host - start[1]) / self.iters * 1e6)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def raw_eager_loop(iters: int, reads_loss: bool, width: int = 4) -> Callable[[], None]:
    """A turn of the loop that a careful user writes in eager mode."""
    import oneflow as flow

    from libai.scheduler import WarmupCosineLR

    model, batches = toy_model(width), toy_data(width)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    schedule = WarmupCosineLR(optimizer, max_iter=ENDLESS, warmup_iter=10)

    def turn() -> None:
        for index in range(iters):
            batch = batches[index % len(batches)]
            inputs = {name: flow.from_numpy(array) for name, array in batch.items()}
            loss = model(**inputs)["losses"]["square"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if reads_loss:
                loss.item()

    return turn


def raw_graph_loop(iters: int, reads_loss: bool, width: int = 4) -> Callable[[], None]:
    """A turn of the same with a hand-written graph, whose schedule is compiled too."""
    import oneflow as flow
    from oneflow import nn

    from libai.oneflow_fixes.launch_race import protect_graph_launches

    model, batches = toy_model(width), toy_data(width)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    schedule = flow.optim.lr_scheduler.CosineDecayLR(optimizer, decay_steps=10**6)

    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer, lr_sch=schedule)

        def build(self, x: Any, y: Any) -> Any:
            loss = self.model(x, y)["losses"]["square"]
            loss.backward()
            return loss

    step = Step()
    with protect_graph_launches():  # OneFlow may crash on tiny graphs (docs/decisions/0006-graph-launch-race.md)
        step(*[flow.from_numpy(array) for array in batches[0].values()])

    def turn() -> None:
        for index in range(iters):
            batch = batches[index % len(batches)]
            loss = step(*[flow.from_numpy(array) for array in batch.values()])
            if reads_loss:
                loss.item()

    return turn


def measure(mode: str, rounds: int, iters: int, log_period: int, folder: Path, width: int = 4) -> dict[str, Micros]:
    """`{"wall": ..., "host": ...}`: microseconds per iteration of `raw`, `raw+sync` and `ours` in each round.

    `ours` is a `Run` with the hooks of a default run (no checkpoint is due) that writes into `folder`. For
    eager mode on CPU `ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD=0` belongs into the environment before oneflow is imported,
    as `tools/train.sh` sets it.
    """
    import oneflow as flow
    from omegaconf import OmegaConf

    from libai.config import LazyCall, defaults, validate
    from libai.engine import Run, default_setup

    train, graph = defaults("train"), defaults("graph")
    num_iters = (rounds + 1) * iters + 1  # the loader is asked once more, which ends the last turn
    train.update(output_dir=str(folder), train_micro_batch_size=width, train_iter=num_iters, log_period=log_period)
    train.checkpointer.update(period=ENDLESS, save_on_exit=False)
    graph.enabled = mode == "graph"
    config = {
        "model": LazyCall("overhead.toy_model")(width=width),
        "optim": LazyCall(flow.optim.SGD)(lr=0.01),
        "lr_scheduler": LazyCall("libai.scheduler.WarmupCosineLR")(max_iter=ENDLESS, warmup_iter=10),
        "dataloader": {"train": LazyCall("overhead.Turns")(rounds=rounds, iters=iters, width=width)},
        "train": train,
        "graph": graph,
    }
    run = default_setup(validate(OmegaConf.create(config, flags={"allow_objects": True})))
    trainer = Run(run)
    raw = {"eager": raw_eager_loop, "graph": raw_graph_loop}[mode]
    turns = trainer.train_loader
    turns.others = {name: raw(iters, name != "raw", width) for name in ("raw", "raw+sync")}
    trainer.train()
    return {"wall": turns.wall, "host": turns.host}


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


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.mode == "both":  # each in a process of its own: the environment of the two differs
        rest = [word for word in arguments if word != "both" and not word.startswith("--mode")]
        command = [sys.executable, __file__, *rest]
        return max(subprocess.run([*command, "--mode", mode]).returncode for mode in ("eager", "graph"))
    if args.mode == "eager":
        os.environ.setdefault("ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD", "0")
    silence = contextlib.redirect_stdout(open(os.devnull, "w"))  # noqa: SIM115  (the console writer's lines)
    with tempfile.TemporaryDirectory() as folder, silence:
        clocks = measure(args.mode, args.rounds, args.iters, args.log_period or ENDLESS, Path(folder), args.width)
    print(json.dumps({"mode": args.mode, **clocks}) if args.json else describe(args.mode, clocks), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
