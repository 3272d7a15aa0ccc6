"""Write the model of a run, or of a Hugging Face folder, as an ONNX file for batches of one size.

The file is kept only where onnxruntime computes with it what the model computes, to 1e-5 of the largest number. It
takes the arguments of the model's forward without labels, with the shapes of a training batch of the run, or of
--input. --drop leaves others out. Needs oneflow_onnx, onnx and onnxruntime: pip install 'libai[onnx]'.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.cli.commands.runs.predict import cut, read_columns
from libai.cli.parser import Parser
from libai.utils.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = build_parser().parse_intermixed_args(arguments)
    columns = None if args.input is None else next(cut(read_columns(args.input), args.batch_size))

    from libai.inference import Pipeline
    from libai.inference.onnx_export import export_onnx

    predictor = Pipeline(args.run, args.checkpoint, "eager", args.settings).predictor
    batch = _training_batch(predictor, args) if columns is None else columns
    kept = {
        name: values for name, values in batch.items() if not (name in args.drop or _is_label(predictor.model, name))
    }
    differences = export_onnx(predictor.model, kept, args.output)
    shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in kept.items())
    print(f"{predictor.checkpoint} -> {args.output}, for {shapes}")
    print("\n".join(f"  {name}: at most {value:.1e} from the model" for name, value in differences.items()))
    return 0


def _training_batch(predictor: Any, args: Any) -> dict[str, Any]:
    from libai.engine.setup.auto_mesh import batch_of

    if predictor.config is None:
        raise UserError(f"{args.run} is no run, so it has no data to take the shapes from. Give --input FILE.")
    return batch_of(predictor.config, predictor.model, args.batch_size)


def _is_label(model: Any, name: str) -> bool:
    """Whether forward can do without `name`, and it is there for a loss."""
    parameter = inspect.signature(type(model).forward).parameters.get(name)
    return name.endswith("labels") and parameter is not None and parameter.default is None


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("kind", choices=["onnx"], help="the format")
    parser.add_argument("run", metavar="RUN", help="the output folder of a run, or a Hugging Face folder")
    parser.add_argument("settings", metavar="key=value", nargs="*", help="changes of the run's config")
    parser.add_argument("--output", "-o", type=Path, default=Path("model.onnx"), help="the file (default model.onnx)")
    parser.add_argument("--input", "-i", type=Path, help="samples for shapes and check: .npz, .jsonl or .csv")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="samples of a batch (default 1)")
    parser.add_argument("--drop", metavar="KEY", action="append", default=[], help="do not give forward this")
    parser.add_argument("--checkpoint", default="last", help="last, best or a name such as iter_0000200 (default last)")
    return parser
