"""Cases by mesh and mode, compared with the plain loop of one process, and faults that must be
detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import mesh_models as mm
import numpy as np
import oneflow as flow
import toy
from parity_cases import Case, Result, grouped, plain_loop, two_groups

from libai.data import build_eval_loader
from libai.engine import EagerTrainer, GraphTrainer
from libai.engine.hooks import CallbackHook
from libai.evaluation import ClassificationEvaluator
from libai.layers import add_lora, synchronize_batch_norms
from libai.models import BERT, GPT, MLP, T5, Llama, ResMLP, ResNet, Swin, SwinV2, ViT
from libai.parallel import Mesh, full_tensor, layout

TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
#: tails of the model on the last stage: its head, its norm and the labels
LAST = ["norm", "head", "labels"]
EVAL_SAMPLES = 13  # not a multiple of any micro-batch: the end is replicated


def adamw(model: Any) -> Any:
    return flow.optim.AdamW(two_groups(model, 0.01), lr=0.01)


def plain(**options: Any) -> Case:
    """Return a builder of `PlainModel` with these options."""
    return Case(adamw, partial(mm.PlainModel, **options), mm.token_batches, max_norm=None)


def _with_adapters() -> Any:
    """Adapters of layers that a plan splits on either axis, and of one that it does not."""
    model = mm.PlainModel(tied=False)
    add_lora(model, ["query", "up", "down", "head"], rank=3, alpha=6.0, dropout=0.1)
    return model


def _synchronized_resnet() -> Any:
    model = ResNet(1, 4, 4, (1, 1), "cifar")
    synchronize_batch_norms(model)
    return model


CLIPPED = 0.5
FAMILIES = {
    "vit": Case(adamw, partial(ViT, 8, 4, 1, 4, 16, 2, 2), mm.image_batches, max_norm=None),
    "swin": Case(
        adamw, partial(Swin, 8, 2, 1, 4, 8, (2, 1), (2, 2), 2), mm.image_batches, max_norm=CLIPPED
    ),
    # a small learning rate, because norms after the branches amplify rounding
    "swinv2": Case(
        grouped("AdamW", 0.001, eps=1e-3),
        partial(SwinV2, 8, 2, 1, 4, 16, (2, 1), (2, 2), 2),
        mm.image_batches,
        max_norm=CLIPPED,
    ),
    "resmlp": Case(
        adamw,
        partial(ResMLP, 8, 2, 1, 4, 16, 2, layer_scale=0.1),
        mm.image_batches,
        max_norm=CLIPPED,
    ),
    "mlp": Case(adamw, partial(MLP, 64, (16, 16), 4), mm.image_batches, max_norm=CLIPPED),
    "resnet": Case(
        adamw,
        partial(ResNet, 1, 4, 4, (1, 1), "cifar"),
        mm.image_batches,
        max_norm=CLIPPED,
    ),
    # statistics of all data-parallel ranks, as in one process
    "synchronized": Case(adamw, lambda: _synchronized_resnet(), mm.image_batches, max_norm=CLIPPED),
}


VISION = ("vit", "swin", "swinv2", "resmlp")
_ROBERTA = {"is_post_norm": True, "num_token_types": 1, "padding_token": 0}
_T5 = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "inner_size": 24, "is_gated": True}
TEXT = {
    "gpt": Case(
        adamw,
        partial(GPT, mm.VOCAB, mm.LENGTH, 16, 2, 2, tie_head=False),
        mm.gpt_batches,
        max_norm=CLIPPED,
    ),
    "llama": Case(
        adamw,
        partial(Llama, mm.VOCAB, mm.LENGTH, 16, 2, 4, 24, 2),
        mm.bert_batches,
        max_norm=CLIPPED,
    ),
    "bert": Case(
        adamw, partial(BERT, mm.VOCAB, mm.LENGTH, 16, 2, 2), mm.bert_batches, max_norm=CLIPPED
    ),
    "roberta": Case(
        adamw,
        partial(BERT, mm.VOCAB, mm.LENGTH, 16, 2, 2, **_ROBERTA),
        mm.bert_batches,
        max_norm=CLIPPED,
    ),
    "t5": Case(adamw, partial(T5, mm.VOCAB, mm.LENGTH, **_T5), mm.bert_batches, max_norm=CLIPPED),
}


@dataclass(frozen=True)
class Planned:
    """A case on a mesh. `split`: instead of the model's own. `iterations`: of 20 at most.

    `fault`: a context in which the trainer (and not the plain loop) is built and runs, to be seen.
    """

    name: str
    case: Case
    mesh: tuple[int, int, int]
    mode: str
    last: bool = False
    split: Mapping[str, int] | None = None
    evaluates: bool = False
    iterations: int = 8
    zero_stage: int = 0
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_control: bool = False

    @property
    def row_name(self) -> str:
        """`1x2x1 eager plain`, unique."""
        suffix = " zero" if self.zero_stage else ""
        steps = f" accumulation {self.case.accumulation}" if self.case.accumulation > 1 else ""
        return (
            f"{'x'.join(map(str, self.mesh))} {self.mode}{suffix} "
            f"{self.name}{' last' if self.last else ''}{steps}"
        )


def planned(world: int, part: str = "") -> Iterator[Planned]:
    """Everything for a job of `world` ranks, the same on every rank, or "quick", for the default
    test command.
    """
    yield from (
        _quick_on_four() if part == "quick" else {2: _on_two, 4: _on_four, 8: _on_eight}[world]()
    )


def _on_every_mesh_of_two(name: str, case: Case, accumulation: int) -> Iterator[Planned]:
    """Return a case for each mesh, with several micro-batches for pipeline stages.

    From family to family, the modes on each mesh alternate, and ZeRO with plain data parallelism:
    `_on_two` compares both modes on every mesh.
    """
    family = [*FAMILIES, *TEXT].index(name)
    modes = list(TRAINERS)[family % 2 :] + list(TRAINERS)[: family % 2]
    planned = partial(Planned, name, iterations=3)
    yield planned(
        case, (2, 1, 1), modes[0], zero_stage=family & 2
    )  # stage 0 for two families, then stage 2 for two
    yield planned(case, (1, 2, 1), modes[0])
    yield planned(replace(case, accumulation=accumulation), (1, 1, 2), modes[1])


def _quick_on_four() -> Iterator[Planned]:
    """Data x tensor and data x pipeline, in both modes, of models that compile in seconds."""
    split = FAMILIES["resmlp"]
    staged = replace(FAMILIES["mlp"], accumulation=2)
    for mode in TRAINERS:
        yield Planned("resmlp", split, (2, 2, 1), mode, iterations=2)
        yield Planned("mlp", staged, (2, 1, 2), mode, iterations=2)
    yield Planned(
        "shards of the wrong rank",
        split,
        (2, 2, 1),
        "eager",
        iterations=2,
        fault=_swapped_shards,
        is_control=True,
    )


def _on_two() -> Iterator[Planned]:
    for mode in TRAINERS:
        tied, untied = plain(), replace(plain(tied=False), max_norm=CLIPPED)
        noisy = replace(plain(dropout=0.2, source_ops=True), max_norm=CLIPPED)
        yield Planned("tied", tied, (2, 1, 1), mode, evaluates=True)
        yield Planned("untied, dropout, source ops", noisy, (1, 2, 1), mode, evaluates=True)
        yield Planned("tied", replace(tied, accumulation=2), (1, 1, 2), mode, evaluates=True)
        yield Planned(
            "untied", replace(untied, accumulation=4), (1, 1, 2), mode, True, evaluates=True
        )
        yield Planned("resnet", FAMILIES["resnet"], (1, 1, 2), mode, evaluates=True)
        yield Planned(
            "resnet", FAMILIES["resnet"], (1, 2, 1), mode, split={"head.*": 0}, evaluates=True
        )
        synchronized = Planned("synchronized", FAMILIES["synchronized"], (2, 1, 1), mode)
        yield replace(synchronized, evaluates=True)
        yield replace(synchronized, case=replace(synchronized.case, accumulation=2), mesh=(1, 1, 2))
        yield replace(synchronized, zero_stage=2)
        for mesh in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
            yield Planned("lora", replace(untied, model=_with_adapters), mesh, mode)
    for name in VISION:
        yield from _on_every_mesh_of_two(name, FAMILIES[name], accumulation=1)
    for name, case in TEXT.items():
        yield from _on_every_mesh_of_two(name, case, accumulation=2)


def _on_four() -> Iterator[Planned]:
    tied, untied = plain(), replace(plain(tied=False), max_norm=CLIPPED)
    for mode in TRAINERS:
        yield Planned(
            "tied",
            replace(plain(tied=True, dropout=0.1), max_norm=CLIPPED),
            (2, 2, 1),
            mode,
            evaluates=True,
        )
        yield Planned(
            "untied", replace(untied, accumulation=2), (2, 1, 2), mode, True, evaluates=True
        )
        yield Planned("tied", tied, (1, 2, 2), mode, evaluates=True)
        yield Planned("tied", replace(tied, max_norm=CLIPPED), (4, 1, 1), mode)
    yield Planned("synchronized", FAMILIES["synchronized"], (2, 1, 2), "eager")


def _on_eight() -> Iterator[Planned]:
    case = replace(plain(tied=False), max_norm=CLIPPED)
    for mode in TRAINERS:
        yield Planned("untied", case, (2, 2, 2), mode, last=True, iterations=3)


def _swapped_shards() -> AbstractContextManager[Any]:
    laid_out = layout._lay_out

    def swapped(tensor: Any, where: Any, its_layout: Any) -> Any:
        if where.axis == 1:  # the second of two products, whose inputs the ranks share
            half = tensor.shape[1] // 2
            tensor = flow.cat([tensor[:, half:], tensor[:, :half]], 1)
        return laid_out(tensor, where, its_layout)

    return mock.patch.object(layout, "_lay_out", swapped)


# ----------------------------------------------------------------------------------------------
# running a case


def batches_of(plan: Planned) -> toy.Batches:
    """Return the global batches of a case."""
    return plan.case.batches()[: plan.iterations]


def parts_of(plan: Planned, mesh: Mesh) -> toy.Batches:
    """Return the micro-batches of this rank, which are those of its data rank."""
    steps = plan.case.accumulation
    pieces = [toy.split(batch, steps * mesh.data) for batch in batches_of(plan)]
    return [piece[step * mesh.data + mesh.data_rank] for piece in pieces for step in range(steps)]


def build_trainer(plan: Planned, loader: Any = None, **options: Any) -> Any:
    """Return the trainer of a case on its mesh. `loader`: the case's batches by default."""
    mesh = Mesh(*plan.mesh)
    case = plan.case
    model, optimizer, schedule = case.build()
    description = {**model.plan, **({"last": LAST} if plan.last else {})}
    if plan.split is not None:
        description["split"] = plan.split
    return TRAINERS[plan.mode](
        model,
        parts_of(plan, mesh) if loader is None else loader,
        optimizer,
        mesh=mesh,
        plan=description,
        device="cpu",
        lr_scheduler=schedule,
        num_accumulation_steps=case.accumulation,
        max_grad_norm=case.max_norm,
        seed=case.seed,
        zero_stage=plan.zero_stage,
        **options,
    )


def record(trainer: Any) -> list[dict[str, float]]:
    """Return a list that collects the metrics of every iteration of `trainer`."""
    lines = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: lines.append(t.fetch_metrics()))])
    return lines


def trained(plan: Planned) -> tuple[Result, Any]:
    """`(result, trainer)` of a case on its mesh. Collective."""
    trainer = build_trainer(plan)
    lines = record(trainer)
    trainer.train(0, plan.iterations)
    return Result(
        [line["train/loss"] for line in lines],
        [line["train/lr"] for line in lines],
        tensors_of(trainer.model),
        [line["train/grad_norm"] for line in lines if "train/grad_norm" in line],
    ), trainer


def expected_of(plan: Planned) -> Result:
    """Return the result of the plain loop of one process."""
    case = replace(plan.case, batches=lambda: batches_of(plan))
    return plain_loop(case, case.accumulation)


def without_noise(result: Result) -> Result:
    """`result` without the biases of attention keys: their gradients are rounding noise, of which
    Adam makes steps, and they have no influence on any output.
    """
    kept = {
        name: array
        for name, array in result.tensors.items()
        if not name.endswith((".k.bias", ".key.bias"))
    }
    return replace(result, tensors=kept)


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """Return parameters and buffers as full arrays on every rank. Collective."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: full_tensor(tensor).numpy().copy() for name, tensor in named}


# ------------------------------------------------------------------------ evaluation and prediction


def eval_data(plan: Planned) -> dict[str, np.ndarray]:
    """Return samples that training has not seen."""
    return {name: array[:EVAL_SAMPLES] for name, array in plan.case.batches()[-1].items()}


def evaluators() -> dict[str, Any]:
    return {"top": ClassificationEvaluator(topk=(1, 2), ignore_index=-100)}


def evaluate(plan: Planned, trainer: Any) -> tuple[dict[str, float], np.ndarray]:
    """`(metrics, logits of this rank's samples)` of the trained model, by the trainer.

    Collective.
    """
    mesh = trainer.mesh
    loader = build_eval_loader(
        eval_data(plan), micro_batch_size=2, data_rank=mesh.data_rank, num_data_ranks=mesh.data
    )
    metrics = trainer.evaluate(loader, evaluators())
    mine = {
        name: array[2 * mesh.data_rank :][:2]
        for name, array in eval_data(plan).items()
        if name != "labels"
    }
    return metrics, trainer.predict(mine)["logits"].numpy()


def evaluate_alone(
    plan: Planned, tensors: dict[str, np.ndarray], mesh: Mesh
) -> tuple[dict[str, float], np.ndarray]:
    """Evaluate by hand: the whole dataset in one batch, on local tensors."""
    from libai.checkpoint import load_weights

    model, _, _ = plan.case.build()
    load_weights({name: tensors[name] for name in model.state_dict()}, model)
    model.eval()
    data = eval_data(plan)
    arguments = {name: flow.from_numpy(array) for name, array in data.items() if name != "labels"}
    with flow.no_grad():
        logits = model(**arguments)["logits"]
    evaluator = evaluators()["top"]
    sums = evaluator.process({"labels": flow.from_numpy(data["labels"])}, {"logits": logits})
    metrics = {f"eval/val/{name}": value for name, value in evaluator.compute(sums).items()}
    return metrics, logits.numpy()[2 * mesh.data_rank :][:2]


def compare_evaluation(plan: Planned, trainer: Any, expected: Result) -> list[float]:
    """Return the largest difference of the evaluation metrics and of this rank's predicted logits.

    Collective.
    """
    metrics, logits = evaluate(plan, trainer)
    wanted, wanted_logits = evaluate_alone(plan, expected.tensors, trainer.mesh)
    assert metrics.keys() == wanted.keys()
    return [
        max(abs(metrics[k] - wanted[k]) for k in wanted),
        float(np.abs(logits - wanted_logits).max()),
    ]
