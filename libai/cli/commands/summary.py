"""Print what a config's model consists of: a line for each module with output, parameters, FLOPs and memory.

The model is built without memory and its forward is traced for one micro-batch, not run; no training is touched. Of a
forward that cannot be traced, outputs, FLOPs and activations are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from libai.config import load_config
from libai.utils.errors import UserError
from libai.utils.parser import Parser, only_result


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    if args.depth is not None and args.depth < 1:
        raise UserError(f"--depth {args.depth}: it must be at least 1. Leave it out for all modules.")
    config: Any = load_config(args.config, args.overrides)

    from libai.engine.graph.build_errors import GraphBuildError
    from libai.engine.setup import build
    from libai.engine.setup.shape_only import batch_of, build_shape_only
    from libai.engine.setup.summary import summarize

    with only_result(args.json):
        model = build_shape_only(lambda: build.build_model(config))
        build.adapt_model(config, model)
        batch = batch_of(config, model)
        optimizer = build.build_optimizer(config, model)
        try:
            found = summarize(model, batch, optimizer)
        except GraphBuildError as error:
            print(f"note: no outputs, FLOPs and activations: {error}", file=sys.stderr)
            found = summarize(model, None, optimizer)
    if args.json:
        print(found.to_json())
        return 0
    total = found.rows[0]
    print(found.table(args.depth, args.memory))
    samples = len(next(iter(batch.values())))
    forward = "" if total.flops is None else f"; forward {total.flops / samples:.4g} FLOPs a sample"
    print(f"\n{total.parameters:,} parameters, {total.trained:,} trained{forward}; batch of {samples}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_config()
    parser.add_argument("--depth", type=int, metavar="N", help="levels of modules to show (default: all)")
    parser.add_argument("--memory", action="store_true", help="show what each takes, instead of outputs and FLOPs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
