"""A T5 of 0.5 million weights that restores missing spans of the Python standard library's source text, byte by byte.

Of 128 bytes 19 are missing in 6 spans: 116 tokens in, 26 out. A guess costs 5.66 nats per token.
"""

from libai.config import LazyCall

from .common.data.stdlib_text import dataloader
from .common.graph import graph
from .common.models.t5 import model as model
from .common.optim import optim
from .common.train import train


def _with_missing_spans(split):
    text = LazyCall("libai.data.build_stdlib_dataset")(split=split, sequence_length=128)
    return LazyCall("libai.data.SpanCorruption")(dataset=text, last_sentinel=287, first_sentinel=257, end_token=256)


dataloader.train.dataset = _with_missing_spans("train")
dataloader.test.val.dataset = _with_missing_spans("validation")

optim.lr = 4e-3
optim.params.weight_decay = 0.05
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/t5_stdlib"
train.train_micro_batch_size = 16
train.test_micro_batch_size = 32
train.train_iter = 400
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.checkpointer.period = 200
train.evaluation.eval_period = 200
train.evaluation.evaluators = {"perplexity": LazyCall("libai.evaluation.PerplexityEvaluator")()}
train.evaluation.eval_metric = "val/loss"
train.evaluation.eval_mode = "min"
