"""The job of the campaign: 12 iterations of 8 samples over all ranks, with a checkpoint every 3
iterations.
"""

import oneflow as flow
from chaos_parts import Disturbed, Model, samples

from libai.config import LazyCall, defaults
from libai.data import build_train_loader

model = LazyCall(Model)()
optim = LazyCall(flow.optim.AdamW)(lr=0.02)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)
dataloader = {"train": LazyCall(build_train_loader)(dataset=LazyCall(samples)())}
train = defaults("train")
train.global_batch_size, train.train_iter, train.log_period, train.seed = 8, 12, 1, 5
train.checkpointer.period, train.checkpointer.max_to_keep = 3, 3
train.writers = ["console", "jsonl"]
train.output_dir = "out"
train.extra_hooks = [LazyCall(Disturbed)()]
graph = defaults("graph")
