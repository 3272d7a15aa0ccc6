"""MiniLM-L6, fine-tuned to predict which library a docstring comes from."""

from classifier import TextClassifier
from omegaconf import OmegaConf
from texts import LIBRARIES, build_dataset, minilm

from configs.common.graph import graph as graph
from configs.common.optim import optim
from configs.common.train import train
from libai.config import LazyCall
from libai.data import build_eval_loader, build_train_loader
from libai.hf import model_config

WEIGHTS = "out/minilm"

model = LazyCall(TextClassifier)(
    encoder=model_config(minilm(WEIGHTS) / "hf", dropout=0.1),
    hidden_size=384,
    num_classes=len(LIBRARIES),
    scale=20.0,
)

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(build_dataset)(split="train", weights=WEIGHTS),
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(build_dataset)(split="validation", weights=WEIGHTS),
            )
        },
    }
)

optim.lr = 2e-4
optim.params.layer_decay = 0.85
optim.params.blocks = "encoder.blocks"
optim.params.base_lr = "${optim.lr}"
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.05)

train.output_dir = "out/text_classifier"
train.load_weight = {
    "path": f"{WEIGHTS}/libai",
    "strict": False,
    "revise_keys": [["^", "encoder."]],
}
train.train_micro_batch_size = 32
train.test_micro_batch_size = 64
train.train_epoch = 3
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.log_period = 50
train.checkpointer.period = "epoch"
train.evaluation.eval_period = "epoch"
train.evaluation.evaluators = {"accuracy": LazyCall("libai.evaluation.ClassificationEvaluator")()}
train.evaluation.eval_metric = "+val/accuracy"
