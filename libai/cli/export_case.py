"""Write down a config's training for programs without OneFlow: `python -m libai.cli.export_case FOLDER CONFIG`.

`case.json` holds the model's class and arguments, the optimizer's settings per parameter, clipping and accumulation;
`weights.safetensors` the initial weights; `batches.safetensors` the first micro-batches, `<number>/<argument of
forward>`. Where `libai.hf` knows the model, `transformers/` holds it as a Hugging Face folder, and `case.json`
the names that our parameters have there. `libai/benchmark/pytorch/torch_training.py` trains from it.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from libai.checkpoint.tensor_files import TensorSpec
from libai.config import load_config, target_of
from libai.config.lazy.instantiation import describe
from libai.launch.guard import guarded_main
from libai.utils.errors import UserError
from libai.utils.parser import Parser


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="python -m libai.cli.export_case", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it does not exist")
    parser.add_argument("config", metavar="CONFIG", help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    parser.add_argument("--batches", type=int, default=64, metavar="N", help="micro-batches to write (default 64)")
    args = parser.parse_intermixed_args(arguments)
    if args.batches < 1:
        raise UserError(f"--batches={args.batches}: there is nothing to train on. Write at least 1.")
    export(args.folder, args.config, args.overrides, args.batches)
    return 0


def export(folder: Path, config: str, overrides: list[str], num_batches: int) -> None:
    """Write the three files. The weights are those that `Run` starts with, the batches its first ones."""
    run: Any = load_config(config, overrides)
    if run.lr_scheduler is not None:
        raise UserError(
            "lr_scheduler is set, and a schedule is no part of an exported case. Export with lr_scheduler=null."
        )
    if run.train.ema.enabled:
        raise UserError("train.ema is no part of an exported case. Export with train.ema.enabled=false.")

    from libai.engine.setup.parts import Parts
    from libai.parallel import Mesh

    parts, clip = Parts.of(run, Mesh()), run.train.clip_grad
    batches = list(itertools.islice(parts.loader, num_batches))
    model = parts.model()
    optimizer = parts.optimizer(model)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    case = {
        "config": config,
        "model": {"class": describe(target_of(run.model)), "arguments": _arguments(run.model)},
        "optimizer": {"class": type(optimizer).__name__, "groups": [_group(g, names) for g in optimizer.param_groups]},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "max_grad_norm": clip.max_norm,
        "max_grad_value": clip.value,
        "num_accumulation_steps": parts.sizes.accumulation,
        "micro_batch_size": parts.sizes.micro,
    }
    folder.mkdir(parents=True, exist_ok=True)
    case["transformers"] = _export_to_transformers(folder, case["model"], model)
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    save_file({name: p.numpy() for name, p in model.named_parameters()}, folder / "weights.safetensors")
    arrays = {f"{i}/{key}": np.ascontiguousarray(v) for i, batch in enumerate(batches) for key, v in batch.items()}
    save_file(arrays, folder / "batches.safetensors")


def _export_to_transformers(folder: Path, described: dict[str, Any], model: Any) -> dict[str, Any]:
    """Write `transformers/`; returns the names that tensors and inputs have there, or why there is no such folder."""
    from omegaconf import OmegaConf

    from libai.hf import export_folder
    from libai.hf.families.registry import family_of
    from libai.hf.families.rules import match
    from libai.hf.files import read_json

    arguments, tensors = described["arguments"], {name: t.numpy() for name, t in model.state_dict().items()}
    is_roberta = described["class"].endswith(".BERT") and arguments.get("padding_token") is not None
    architecture = "RobertaForMaskedLM" if is_roberta else None
    target = folder / "transformers"
    with tempfile.TemporaryDirectory() as scratch:
        OmegaConf.save({"model": {"_target_": described["class"], **arguments}}, Path(scratch, "config.yaml"))
        save_file(tensors, Path(scratch, "model.safetensors"))
        try:
            export_folder(scratch, target, architecture=architecture)
        except UserError as error:
            return {"reason": str(error).replace(scratch, "the case")}
    config = read_json(target / "config.json")
    _, family = family_of(config)
    specs = {name: TensorSpec(str(array.dtype), array.shape) for name, array in tensors.items()}
    names = {theirs: found.ours for theirs, found in match(family.rules_for(config), specs).items()}
    return {"names": names, "inputs": {ours: theirs for theirs, ours in family.inputs.items()}}


def _arguments(section: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(section, resolve=True)
    return {name: value for name, value in plain.items() if name != "_target_"}


def _group(group: Any, names: dict[int, str]) -> dict[str, Any]:
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    settings = {key: group[key] for key in keys if key in group}
    return {"parameters": [names[id(parameter)] for parameter in group.parameters], **settings}


if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
