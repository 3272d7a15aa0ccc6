"""GPT, BERT, ViT, ResNet and AlexNet in PyTorch, for tools/benchmark.py: the same weights, data, optimizer and losses.

    TORCH_PYTHON tools/benchmark_torch.py CONFIG [overrides]     asks `python` on the PATH to export the case
    TORCH_PYTHON tools/benchmark_torch.py --case FOLDER          takes one that tools/export_case.py has written

Runs in an environment of its own with torch, numpy and safetensors; imports neither libai nor oneflow. Reads JSON lines
from standard input: `{"command": "run", "iterations": N, "losses": bool}` and `{"command": "quit"}`, and answers each
with one line (`libai/benchmark/protocol.py` describes the fields). Eager PyTorch with its own number of threads by
default: a core each, or OMP_NUM_THREADS. The batches of the case are used in turn, again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

# ------------------------------------------------------------------------------- the models, named as libai.models are


class Attention(nn.Module):
    """Multi-head self-attention with separate projections; (batch, length, hidden) to the same."""

    def __init__(self, hidden_size: int, num_heads: int, is_causal: bool, plain: bool):
        super().__init__()
        self.num_heads, self.is_causal, self.plain = num_heads, is_causal, plain
        self.q, self.k, self.v, self.out = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.plain:
            scores = (q @ k.transpose(-2, -1)) * (width // self.num_heads) ** -0.5
            if self.is_causal:
                scores = scores + torch.full((length, length), -1e9).triu(1)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLPBlock(nn.Module):
    """The two-layer network of a block."""

    def __init__(self, hidden_size: int, mlp_ratio: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, int(hidden_size * mlp_ratio))
        self.down = nn.Linear(int(hidden_size * mlp_ratio), hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, is_causal: bool, plain: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, is_causal, plain)
        self.mlp = MLPBlock(hidden_size, mlp_ratio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _blocks(sizes: dict[str, Any], is_causal: bool, plain: bool) -> nn.ModuleList:
    each = (sizes["hidden_size"], sizes["num_heads"], sizes["mlp_ratio"], is_causal, plain)
    return nn.ModuleList([Block(*each) for _ in range(sizes["num_layers"])])


class LanguageModel(nn.Module):
    """GPT (causal) and BERT (with its extra head), by the arguments of libai's classes of these names."""

    def __init__(self, name: str, sizes: dict[str, Any], plain: bool):
        super().__init__()
        hidden_size, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
        self.is_bert, self.ignore_index = name == "BERT", sizes["ignore_index"]
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Parameter(torch.zeros(sizes["max_seq_length"], hidden_size))
        self.blocks = _blocks(sizes, not self.is_bert, plain)
        self.norm = nn.LayerNorm(hidden_size)
        self.head: nn.Module | None = None
        if self.is_bert:
            self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size))
            self.head_bias = nn.Parameter(torch.zeros(vocab_size))
        elif not sizes["tie_head"]:
            self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(input_ids) + self.position_embedding[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        if self.is_bert:
            x = F.linear(x, self.token_embedding.weight, self.head_bias)
        elif self.head is None:
            x = F.linear(x, self.token_embedding.weight)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index)


class ViT(nn.Module):
    """An image classifier, by the arguments of `libai.models.ViT`."""

    def __init__(self, sizes: dict[str, Any], plain: bool):
        super().__init__()
        size, hidden_size = sizes["patch_size"], sizes["hidden_size"]
        self.patch_size, self.pool = size, sizes["pool"]
        num_tokens = (sizes["image_size"] // size) ** 2 + (self.pool == "cls")
        self.patch_embedding = nn.Linear(sizes["num_channels"] * size**2, hidden_size)
        if self.pool == "cls":
            self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.position_embedding = nn.Parameter(torch.zeros(num_tokens, hidden_size))
        self.blocks = _blocks(sizes, False, plain)
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = images.shape
        size = self.patch_size
        x = images.reshape(batch, channels, height // size, size, width // size, size)
        x = self.patch_embedding(x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size))
        if self.pool == "cls":
            x = torch.cat([self.class_token.expand(batch, -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.cross_entropy(self.head(x[:, 0] if self.pool == "cls" else x.mean(dim=1)), labels)


class BasicBlock(nn.Module):
    """A block of ResNet."""

    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.norm2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out)
        projected = stride > 1 or num_in != num_out
        parts = [nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)] if projected else []
        self.shortcut = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """An image classifier, by the arguments of `libai.models.ResNet`."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, is_small = sizes["width"], sizes["stem"] == "cifar"
        self.stem = nn.Sequential(
            nn.Conv2d(sizes["num_channels"], width, *((3, 1, 1) if is_small else (7, 2, 3)), bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *([] if is_small else [nn.MaxPool2d(3, 2, 1)]),
        )
        widths = [width * 2**stage for stage, count in enumerate(sizes["blocks_per_stage"]) for _ in range(count)]
        pairs = zip([width, *widths], widths)
        self.blocks = nn.ModuleList([BasicBlock(num_in, num_out, num_out // num_in) for num_in, num_out in pairs])
        self.head = nn.Linear(widths[-1], sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class AlexNet(nn.Module):
    """An image classifier, by the arguments of `libai.models.AlexNet`; without dropout."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, hidden_size = sizes["width"], sizes["hidden_size"]
        channels = [sizes["num_channels"], width, width * 3, width * 6, width * 4, width * 4]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.ReLU(), *([nn.MaxPool2d(2, 2)] if i in (0, 1, 4) else []))
            for i, (a, b) in enumerate(zip(channels, channels[1:]))
        ]
        self.features = nn.Sequential(*layers)
        num_features = channels[-1] * (sizes["image_size"] // 8) ** 2
        self.classifier = nn.Sequential(
            nn.Identity(), nn.Linear(num_features, hidden_size), nn.ReLU(),
            nn.Identity(), nn.Linear(hidden_size, hidden_size), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(hidden_size, sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.classifier(self.features(images).flatten(1))), labels)


# ------------------------------------------------------------------------------------------------------- training


class Unavailable(Exception):
    """The case cannot be trained here; the text says why."""


def build_model(case: dict[str, Any], plain: bool = False) -> nn.Module:
    """The model of a case. `plain`: attention from matrix products and a softmax instead of PyTorch's own function."""
    name, sizes = case["model"]["class"].rpartition(".")[2], case["model"]["arguments"]
    for rate in ("dropout", "drop_path"):
        if sizes.get(rate):
            raise Unavailable(f"model.{rate}={sizes[rate]}: PyTorch draws other masks, so the losses could not agree")
    if name in ("GPT", "BERT"):
        return LanguageModel(name, sizes, plain)
    if name == "ViT":
        return ViT(sizes, plain)
    if name in ("ResNet", "AlexNet"):
        return {"ResNet": ResNet, "AlexNet": AlexNet}[name](sizes)
    raise Unavailable(f"{name} has no twin in PyTorch here; there are GPT, BERT, ViT, ResNet and AlexNet")


def build_optimizer(case: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a case, in PyTorch's default implementation, with the same parameter groups."""
    found = case["optimizer"]
    if found["class"] not in ("AdamW", "SGD"):
        raise Unavailable(f"optimizer {found['class']} has no twin here; there are AdamW and SGD")
    named = dict(model.named_parameters())
    groups = [{**group, "params": [named[name] for name in group["parameters"]]} for group in found["groups"]]
    for group in groups:
        del group["parameters"]
    return getattr(torch.optim, found["class"])(groups)


class Trainer:
    """A plain loop over the batches of the case in `folder`."""

    def __init__(self, folder: Path, plain: bool = False):
        self.case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        self.model = build_model(self.case, plain)
        buffers = dict(self.model.named_buffers())  # which begin alike in both libraries
        self.model.load_state_dict({**buffers, **load_file(folder / "weights.safetensors")})
        self._optimizer = build_optimizer(self.case, self.model)
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
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _next_batch(self) -> dict[str, torch.Tensor]:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        return {key: tensor.clone() for key, tensor in batch.items()}  # a loader hands out fresh memory as well

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """The answer to the command `run`; without losses one more iteration is made before the clock starts."""
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
            "peak_rss_bytes": _status("VmHWM"),
        }


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------------- protocol


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmark_torch.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="what to export and train")
    parser.add_argument("--case", type=Path, metavar="FOLDER", help="an exported case instead")
    parser.add_argument("--python", default="python", help="interpreter of the environment with libai")
    parser.add_argument("--threads", type=int, help="compute threads (default: PyTorch's)")
    parser.add_argument("--plain-attention", action="store_true", help="not scaled_dot_product_attention")
    args = parser.parse_intermixed_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on standard output

    def reply(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        trainer = _trainer(args)
    except Unavailable as reason:
        reply(event="unavailable", reason=str(reason))
        return 0
    case = trainer.case
    reply(
        event="ready",
        mode="torch-eager",
        device="cpu",
        processes=1,
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        global_batch_size=case["micro_batch_size"] * case["num_accumulation_steps"],
        settings=f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)",
        rss_bytes=_status("VmRSS"),
    )
    commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "run": lambda m: trainer.run(int(m["iterations"]), bool(m.get("losses"))),
    }
    for line in iter(sys.stdin.readline, ""):
        message = json.loads(line)
        if message["command"] == "quit":
            break
        if message["command"] in commands:
            reply(event="done", **commands[message["command"]](message))
        else:
            reply(event="unavailable", reason=f"no command {message['command']!r} here")
    return 0


def _trainer(args: argparse.Namespace) -> Trainer:
    if args.case is not None:
        return Trainer(args.case, args.plain_attention)
    if not args.words:
        raise Unavailable("neither a config nor --case FOLDER was named")
    tool = Path(__file__).resolve().with_name("export_case.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, str(tool), folder, *args.words]
        try:
            exported = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            raise Unavailable(f"--python {args.python} cannot be started ({error.strerror})") from None
        if exported.returncode != 0:
            reason = (exported.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unavailable(f"tools/export_case.py ended with code {exported.returncode}: {reason}")
        return Trainer(Path(folder), args.plain_attention)


if __name__ == "__main__":
    sys.exit(main())
