"""SmolLM2-135M, fine-tuned with low-rank adapters on the answers of your own conversations."""

from conversations import build_chat_dataset
from docstrings import smollm2
from omegaconf import OmegaConf

from configs.common.graph import graph as graph
from configs.common.optim import optim
from configs.common.train import train
from libai.config import LazyCall
from libai.data import build_train_loader
from libai.hf import model_config

WEIGHTS = "out/smollm2"

model = model_config(smollm2(WEIGHTS) / "hf", max_seq_length=256)

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(build_chat_dataset)(
                file="conversations.jsonl", weights=WEIGHTS, length=256
            ),
        )
    }
)

optim.lr = 1e-3
optim.weight_decay = 0.0
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1)

train.output_dir = "out/smollm2_chat"
train.load_weight.path = f"{WEIGHTS}/libai"
train.lora = {"patterns": [r"attention\.[qkv]$", r"attention\.out$"], "rank": 8, "alpha": 16}
train.train_micro_batch_size = 4
train.train_epoch = 3
train.warmup_ratio = 0.1
train.clip_grad.max_norm = 1.0
train.log_period = 10
train.evaluation.enabled = False
