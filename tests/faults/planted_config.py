"""The job of the planted faults: 40 iterations of 2 micro-batches, 8 samples over all ranks."""

import oneflow as flow
import planted
from planted import Counted, Model, Planted, StruckModel, samples

from libai.config import LazyCall, defaults
from libai.data import build_eval_loader, build_train_loader

model = LazyCall(StruckModel if planted.FAULT.get("point") in ("compile", "forward") else Model)()
optim = LazyCall(flow.optim.AdamW)(lr=0.02)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)
dataloader = {
    "train": LazyCall(build_train_loader)(dataset=LazyCall(samples)()),
    "test": {"val": LazyCall(build_eval_loader)(dataset=LazyCall(samples)(count=37))},
}
train = defaults("train")
train.global_batch_size, train.train_iter, train.log_period, train.seed = 8, 40, 1, 5
train.num_accumulation_steps, train.test_micro_batch_size = 2, 4
train.rehearse = 0
train.clip_grad.max_norm = 0.5
train.checkpointer.period, train.checkpointer.max_to_keep = 2, 3
train.evaluation.eval_period = 3
train.evaluation.evaluators = {"counted": LazyCall(Counted)()}
train.writers = ["console", "jsonl"]
train.output_dir = "out"
train.extra_hooks = [LazyCall(Planted)()]
graph = defaults("graph")
