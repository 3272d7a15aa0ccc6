"""Settings shared by the small language models on the standard library: a minute of AdamW; the loss
picks the best.
"""

from libai.config import LazyCall

from .graph import graph
from .optim import optim
from .train import train

optim.weight_decay = 0.05
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

graph.enabled = False  # true compiles the same training

train.train_micro_batch_size = 16
train.test_micro_batch_size = 32
train.train_iter = 400
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.checkpointer.period = 200
train.evaluation.eval_period = 200
train.evaluation.evaluators = {"perplexity": LazyCall("libai.evaluation.PerplexityEvaluator")()}
train.evaluation.eval_metric = "val/loss"
