"""Settings shared by the image classifiers on handwritten digits: half a minute of AdamW; accuracy
picks the best.
"""

from libai.config import LazyCall

from .graph import graph
from .optim import optim
from .train import train

optim.lr = 3e-3
optim.weight_decay = 0.01
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

graph.enabled = False  # true compiles the same training

train.train_micro_batch_size = 64
train.test_micro_batch_size = 120
train.train_iter = 300
train.warmup_ratio = 0.1
train.checkpointer.period = 150
train.evaluation.eval_period = 100
train.evaluation.evaluators = {
    "accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")(topk=[1])
}
train.evaluation.eval_metric = "val/accuracy"
