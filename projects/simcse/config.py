"""SimCSE on the docstrings of the standard library. Takes half a minute on two CPU cores."""

from omegaconf import OmegaConf
from sentences import build_dataset
from simcse import RetrievalEvaluator, SimCSE

from configs.common.graph import graph as graph
from configs.common.optim import optim
from configs.common.train import train
from libai.config import LazyCall
from libai.data import build_eval_loader, build_train_loader

model = LazyCall(SimCSE)(
    temperature=0.05,
    vocab_size=8192,
    max_seq_length=32,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    dropout=0.1,
)

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(build_dataset)(split="train", views="halves")
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(build_dataset)(split="validation", views="halves")
            )
        },
    }
)

optim.lr = 1e-3
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

train.output_dir = "out/simcse"
train.global_batch_size = 64
train.train_iter = 300
train.warmup_ratio = 0.1
train.log_period = 50
train.clip_grad.max_norm = 1.0
train.checkpointer.period = 300
train.evaluation.eval_period = 100
train.evaluation.evaluators = {"recall": LazyCall(RetrievalEvaluator)()}
train.evaluation.eval_metric = "+val/recall"
