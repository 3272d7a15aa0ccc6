"""Training in PyTorch as a variant of a benchmark: the same weights, data, optimizer and losses.

    TORCH_PYTHON libai/benchmark/pytorch/torch_training.py CONFIG [overrides]

asks `python` on the PATH to export the case, and trains it. Runs in an environment of its own with torch, numpy,
safetensors and, for most models, transformers; imports neither oneflow nor the package libai, but single files of it.

Reads JSON lines from standard input: `{"command": "run", "iterations": N, "losses": bool}` and `{"command": "quit"}`,
and answers each with one line (`libai/benchmark/protocol.py` describes the fields). Eager PyTorch with its own number
of threads by default: a core each, or OMP_NUM_THREADS. The batches of the case are used in turn, again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # last, since a file there has the name of Python's `statistics`

from protocol import Unavailable, Variant, encode, resources_of_this_process, serve
from safetensors.torch import load_file
from torch import nn
from torch_models import FromTransformers, build_model


def build_optimizer(case: dict[str, Any], named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a case, in PyTorch's default implementation, with the same parameter groups."""
    found = case["optimizer"]
    if found["class"] not in ("AdamW", "SGD"):
        raise Unavailable(f"optimizer {found['class']} has no twin here; there are AdamW and SGD")
    groups = [{**group, "params": [named[name] for name in group["parameters"]]} for group in found["groups"]]
    for group in groups:
        del group["parameters"]
    return getattr(torch.optim, found["class"])(groups)


class Trainer(Variant):
    """A plain loop over the batches of the case in `folder`."""

    def __init__(self, folder: Path):
        self.case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        self.model = build_model(self.case, folder)
        if isinstance(self.model, FromTransformers):
            named = self.model.named
        else:
            buffers = dict(self.model.named_buffers())  # which begin alike in both libraries
            self.model.load_state_dict({**buffers, **load_file(folder / "weights.safetensors")})
            named = dict(self.model.named_parameters())
        self.model.requires_grad_(False)
        for name, parameter in named.items():
            parameter.requires_grad_(name not in self.case["frozen"])
        self._optimizer = build_optimizer(self.case, named)
        arrays = load_file(folder / "batches.safetensors")
        count = 1 + max(int(name.partition("/")[0]) for name in arrays)
        self._batches: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, tensor in arrays.items():
            number, _, key = name.partition("/")
            self._batches[int(number)][key] = tensor
        self._next = 0

    def iterate(self) -> torch.Tensor:
        """One update; returns its loss."""
        steps = self.case["num_accumulation_steps"]
        batches = [self._next_batch() for _ in range(steps)]
        # the mean over all labels that count, however the micro-batches share them
        counts = [(batch["labels"] != -100).sum() for batch in batches] if steps > 1 else []
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            loss = self.model(**batch)
            if steps > 1:
                loss = loss * (counts[number] / sum(counts))
            loss.backward()
            total = total + loss.detach()
        if self.case["max_grad_norm"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case["max_grad_norm"])
        if self.case["max_grad_value"] is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.case["max_grad_value"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _next_batch(self) -> dict[str, torch.Tensor]:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        return {key: tensor.clone() for key, tensor in batch.items()}  # a loader hands out fresh memory as well

    def facts(self) -> dict[str, Any]:
        return {
            "mode": "torch-eager",
            "device": "cpu",
            "processes": 1,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "global_batch_size": self.case["micro_batch_size"] * self.case["num_accumulation_steps"],
            "settings": f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)",
            "rss_bytes": resources_of_this_process()["rss_bytes"],
        }

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """See `Variant.run`; without losses one more iteration is made before the clock starts."""
        before = time.process_time()
        if not losses:
            self.iterate()
        start, cpu_start = time.perf_counter(), time.process_time()
        found = []
        for _ in range(iterations):
            loss = self.iterate()
            if losses:
                found.append(float(loss))
        seconds = time.perf_counter() - start
        after = time.process_time()
        return {
            "seconds": seconds,
            "losses": found,
            "cpu_seconds": [before, after],
            "run_cpu_seconds": after - cpu_start,
            "peak_rss_bytes": resources_of_this_process()["peak_rss_bytes"],
        }


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torch_training.py", allow_abbrev=False)
    parser.add_argument("words", nargs="+", metavar="CONFIG key=value", help="what to export and train")
    parser.add_argument("--python", default="python", help="interpreter of the environment with libai")
    args = parser.parse_intermixed_args(arguments)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on standard output

    def reply(message: Mapping[str, Any]) -> None:
        answers.write(encode(message))
        answers.flush()

    serve(lambda: _trainer(args), iter(sys.stdin.readline, ""), reply)
    return 0


def _trainer(args: argparse.Namespace) -> Trainer:
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, "-m", "libai.cli.export_case", folder, *args.words]
        try:
            exported = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=environment)
        except OSError as error:
            raise Unavailable(f"--python {args.python} cannot be started ({error.strerror})") from None
        if exported.returncode != 0:
            reason = (exported.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unavailable(f"exporting the case ended with code {exported.returncode}: {reason}")
        return Trainer(Path(folder))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
