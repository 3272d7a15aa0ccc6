"""Propose how to spread a config over ranks that need not be here.

Prints every mesh that the model's plan allows, with the memory and the traffic of a rank, and which one to take.
The model is built without memory and its forward is traced, not run. docs/distributed.md says what is estimated how.

Exit codes: 0 a proposal; 2 nothing fits, or a mistake in config or arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from libai.cli.parser import Parser, only_result, require_one_process
from libai.config import load_config
from libai.utils.errors import UserError
from libai.utils.screen import columns
from libai.utils.sizes import format_bytes, parse_bytes

#: columns that a narrow terminal leaves out, in this order, until the others fit
_DETAILS = ("samples", "pipeline", "tensor", "data", "activations", "optimizer", "gradients", "weights", "bubble")


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    require_one_process("; --ranks says how many ranks to plan for")
    if args.ranks < 1:
        raise UserError(f"--ranks={args.ranks}: there is at least one rank. Give the number of processes to plan for.")
    memory = parse_bytes(args.device_memory, "--device-memory")
    links = _read_links(args.interconnect, args.ranks_per_machine)
    with only_result(args.json):
        mode, proposals = _propose(args)
        chosen = proposals.choose(memory, links)
    fitting = proposals.fitting(memory)
    if args.json:
        print(json.dumps(_as_json(args, mode, memory, chosen, proposals, fitting), indent=1))
    else:
        print(_as_text(args, mode, memory, chosen, proposals, fitting, links))
    return 0


def _propose(args: argparse.Namespace) -> tuple[str, Any]:
    overrides = [*args.overrides, "train.dist.auto=true"]
    if args.micro_batch is not None:
        overrides.append(f"train.train_micro_batch_size={args.micro_batch}")
    run: Any = load_config(args.config, overrides, args.ranks)
    mode = args.mode or ("eager" if run.mode == "eager" else "graph")

    from libai.engine.setup.auto_mesh import propose_for, supported_options

    device = "cuda" if run.train.device == "auto" else run.train.device
    zero_stages, recomputation = ([0, 1, 2, 3], [False, True]) if args.all_options else supported_options(mode, device)
    return mode, propose_for(run, args.ranks, device, mode, zero_stages, recomputation)


def _read_links(text: str | None, ranks_per_machine: int | None) -> Any:
    if text is None:
        if ranks_per_machine is not None:
            raise UserError("--ranks-per-machine tells two links apart: give --interconnect=WITHIN,BETWEEN as well.")
        return None
    from libai.parallel.planner.candidates import Links

    speeds = [parse_bytes(part.strip().removesuffix("/s"), "--interconnect") for part in text.split(",")]
    if len(speeds) > 2 or (len(speeds) == 2) != (ranks_per_machine is not None):
        raise UserError(
            f"--interconnect={text!r} with --ranks-per-machine={ranks_per_machine}: one speed is for all ranks, two "
            "are within and between machines of that many ranks. Write --interconnect=25GB/s, or "
            "--interconnect=300GB/s,25GB/s --ranks-per-machine=8."
        )
    return Links(speeds[0], speeds[-1], ranks_per_machine or 1)


def _overrides_of(proposal: Any) -> list[str]:
    mesh = proposal.mesh
    made = [
        f"train.dist.data_parallel_size={mesh.data}",
        f"train.dist.tensor_parallel_size={mesh.tensor}",
        f"train.dist.pipeline_parallel_size={mesh.pipeline}",
    ]
    if proposal.zero_stage:
        made += ["train.zero_optimization.enabled=true", f"train.zero_optimization.stage={proposal.zero_stage}"]
    return [*made, *(["train.activation_checkpoint.enabled=true"] if proposal.recomputes else [])]


def _as_text(
    args: argparse.Namespace, mode: str, memory: int, chosen: Any, proposals: Any, fitting: list[Any], links: Any
) -> str:
    headings: tuple[str, ...] = (
        "",
        "data x tensor x pipeline",
        "memory",
        "weights",
        "gradients",
        "optimizer",
        "activations",
    )
    headings += ("sent/iter", "data", "tensor", "pipeline", "samples", "bubble", *(["seconds"] if links else []))
    rows = [headings]
    for p in sorted(proposals.candidates, key=lambda p: (p not in fitting, p.traffic.total / p.samples)):
        m, t = p.memory, p.traffic
        sizes = (m.total, m.weights, m.gradients, m.optimizer, m.activations, t.total, t.data, t.tensor, t.pipeline)
        mark = "->" if p is chosen else ("" if p in fitting else "no")
        row = (mark, p.describe(), *map(format_bytes, sizes), str(p.samples), f"{p.bubble:.0%}")
        rows.append((*row, f"{links.seconds(t, p.mesh):.3g}") if links else row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(headings))]
    shown, terminal = list(range(len(headings))), columns(sys.stdout)
    for name in _DETAILS if terminal else ():
        if sum(widths[i] + 2 for i in shown) - 2 > (terminal or 0):
            shown.remove(headings.index(name))
    lines = ["  ".join(row[i].ljust(widths[i]) for i in shown).rstrip() for row in rows]
    batch = chosen.batch
    lines += [
        "",
        f"{len(fitting)} of {len(proposals.candidates)} fit into {format_bytes(memory)} per rank ({mode} mode); "
        f"{len(proposals.ruled_out)} meshes are ruled out by the plan or the batch sizes.",
        f"Take {chosen.describe()} with micro-batch {batch.micro} x {batch.accumulation} accumulation:",
        "  " + " ".join(_overrides_of(chosen)),
    ]
    if args.verbose:
        lines += ["", "Ruled out:"]
        lines += [f"  {m.data} x {m.tensor} x {m.pipeline}: {why}" for m, why in proposals.ruled_out.items()]
    return "\n".join(lines)


def _as_json(
    args: argparse.Namespace, mode: str, memory: int, chosen: Any, proposals: Any, fitting: list[Any]
) -> dict[str, Any]:
    def row(p: Any) -> dict[str, Any]:
        return {
            "data": p.mesh.data,
            "tensor": p.mesh.tensor,
            "pipeline": p.mesh.pipeline,
            "zero_stage": p.zero_stage,
            "recomputes": p.recomputes,
            "micro_batch": p.batch.micro,
            "accumulation": p.batch.accumulation,
            "bubble": p.bubble,
            "fits": p in fitting,
            "memory": {**vars(p.memory), "total": p.memory.total},
            "traffic": {**vars(p.traffic), "total": p.traffic.total},
        }

    return {
        "ranks": args.ranks,
        "device_memory": memory,
        "mode": mode,
        "chosen": row(chosen),
        "overrides": _overrides_of(chosen),
        "candidates": [row(p) for p in proposals.candidates],
        "ruled_out": [
            {"data": m.data, "tensor": m.tensor, "pipeline": m.pipeline, "why": why}
            for m, why in proposals.ruled_out.items()
        ],
    }


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_config()
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of processes to plan for")
    parser.add_argument("--device-memory", required=True, metavar="SIZE", help="memory of one device, such as 40GiB")
    parser.add_argument("--mode", choices=["eager", "graph"], help="default: the config's")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="train.train_micro_batch_size")
    parser.add_argument("--interconnect", metavar="SPEED[,SPEED]", help="such as 25GB/s, or within,between machines")
    parser.add_argument("--ranks-per-machine", type=int, metavar="N", help="where the second speed begins")
    parser.add_argument(
        "--all-options", action="store_true", help="also ZeRO and recomputation where this version refuses them"
    )
    parser.add_argument("--verbose", action="store_true", help="say why each mesh is ruled out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
