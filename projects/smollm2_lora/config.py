"""SmolLM2-135M, fine-tuned with low-rank adapters on the docstrings of the standard library."""

from docstrings import build_dataset, smollm2
from omegaconf import OmegaConf

from configs.common.graph import graph as graph
from configs.common.optim import optim
from configs.common.train import train
from libai.config import LazyCall
from libai.data import build_eval_loader, build_train_loader
from libai.hf import model_config

WEIGHTS = "out/smollm2"

model = model_config(smollm2(WEIGHTS) / "hf", max_seq_length=64)

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(build_dataset)(split="train", weights=WEIGHTS, length=64),
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(build_dataset)(split="validation", weights=WEIGHTS, length=64),
                max_batches=12,
            )
        },
    }
)

optim.lr = 1e-3
optim.weight_decay = 0.0
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

train.output_dir = "out/smollm2_lora"
train.load_weight.path = f"{WEIGHTS}/libai"
train.lora = {"patterns": [r"attention\.[qkv]$", r"attention\.out$"], "rank": 8, "alpha": 16}
train.train_micro_batch_size = 8
train.train_iter = 80
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.log_period = 10
train.checkpointer.period = 80
train.evaluation.eval_period = 40
train.evaluation.evaluators = {"perplexity": LazyCall("libai.evaluation.PerplexityEvaluator")()}
