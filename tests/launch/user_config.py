"""A user's config next to user_models.py: 20 iterations of 8 samples over all ranks."""

import oneflow as flow
from user_models import samples

from libai.config import LazyCall, defaults
from libai.data import build_eval_loader, build_train_loader

model = LazyCall("user_models.Good")()
optim = LazyCall(flow.optim.AdamW)(lr=0.02)
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)
dataloader = {
    "train": LazyCall(build_train_loader)(dataset=LazyCall(samples)()),
    "test": {"val": LazyCall(build_eval_loader)(dataset=LazyCall(samples)(count=37))},
}
train = defaults("train")
train.global_batch_size, train.train_iter, train.log_period = 8, 20, 1
train.clip_grad.max_norm = 0.5
train.output_dir = "out"
graph = defaults("graph")
