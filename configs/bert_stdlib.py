"""A BERT of 0.38 million weights that restores masked bytes of the Python standard library's source text."""

from libai.config import LazyCall

from .common.data.stdlib_text import dataloader
from .common.graph import graph
from .common.models.bert import model
from .common.optim import optim
from .common.train import train


def _masked_text(split):
    text = LazyCall("libai.data.build_stdlib_dataset")(split=split, sequence_length="${model.max_seq_length}")
    return LazyCall("libai.data.MaskedTokens")(dataset=text, mask_token=257, mask_prob=0.15, seed=0)


dataloader.train.dataset = _masked_text("train")
dataloader.test.val.dataset = _masked_text("validation")
model.update(vocab_size=258, max_seq_length=64)  # 257 tokens of the byte tokenizer, then the mask

optim.lr = 3e-3
optim.params.weight_decay = 0.05
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

graph.enabled = False  # true compiles the same training

train.output_dir = "out/bert_stdlib"
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
