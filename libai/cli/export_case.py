"""Write down a config's training for programs without OneFlow. Called by tools/export_case.py.

`case.json` holds the model's class and arguments, the optimizer's settings per parameter, clipping and accumulation;
`weights.safetensors` the initial weights; `batches.safetensors` the first micro-batches, `<number>/<argument of
forward>`. `tools/benchmark_torch.py` trains from it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from libai.cli.parser import Parser
from libai.config import batch_sizes_of, load_config, target_of
from libai.config.lazy.instantiation import describe
from libai.utils.errors import UserError
from libai.utils.seeding import resolve_seed, seed_everything


def run(arguments: Sequence[str]) -> int:
    parser = Parser(description=__doc__)
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
    if run.train.ema.enabled or run.train.unfreeze:
        raise UserError(
            "train.ema and train.unfreeze are no part of an exported case. Export with train.ema.enabled=false and "
            "train.unfreeze=null."
        )

    import oneflow as flow

    from libai.engine.setup import build
    from libai.parallel import Mesh

    train = run.train
    seed = seed_everything(resolve_seed(train.seed))
    sizes = batch_sizes_of(train, 1)
    loader = build.build_train_loader(run, Mesh(), sizes.micro, seed)
    batches = list(itertools.islice(loader, num_batches))
    flow.manual_seed(seed)  # as in `Run`: the same weights
    model = build.build_model(run)
    optimizer = build.build_optimizer(run, model)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    case = {
        "config": config,
        "model": {"class": describe(target_of(run.model)), "arguments": _arguments(run.model)},
        "optimizer": {"class": type(optimizer).__name__, "groups": [_group(g, names) for g in optimizer.param_groups]},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "max_grad_norm": train.clip_grad.max_norm,
        "norm_type": train.clip_grad.norm_type,
        "max_grad_value": train.clip_grad.value,
        "num_accumulation_steps": sizes.accumulation,
        "micro_batch_size": sizes.micro,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    save_file({name: p.numpy() for name, p in model.named_parameters()}, folder / "weights.safetensors")
    arrays = {f"{i}/{key}": np.ascontiguousarray(v) for i, batch in enumerate(batches) for key, v in batch.items()}
    save_file(arrays, folder / "batches.safetensors")


def _arguments(section: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(section, resolve=True)
    return {name: value for name, value in plain.items() if name != "_target_"}


def _group(group: Any, names: dict[int, str]) -> dict[str, Any]:
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    settings = {key: group[key] for key in keys if key in group}
    return {"parameters": [names[id(parameter)] for parameter in group.parameters], **settings}
