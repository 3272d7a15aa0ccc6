"""A small user config. Each bad input changes one part of it."""

import oneflow as flow
from user_parts import samples

from libai.config import LazyCall, defaults
from libai.data import build_eval_loader, build_train_loader

model = LazyCall("user_parts.Net")(width=4)
optim = LazyCall(flow.optim.AdamW)(lr=0.02, betas=[0.9, 0.999])
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)
dataloader = {
    "train": LazyCall(build_train_loader)(dataset=LazyCall(samples)()),
    "test": {"val": LazyCall(build_eval_loader)(dataset=LazyCall(samples)(count=16))},
}
train = defaults("train")
train.train_micro_batch_size, train.train_iter, train.log_period = 8, 2, 1
train.device = "cpu"
train.output_dir = "out"
train.writers = ["console", "jsonl"]
train.evaluation.evaluators = {"mine": LazyCall("user_parts.Evaluator")()}
graph = defaults("graph")
