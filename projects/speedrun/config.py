"""Train a GPT on the standard library to 1.98 nats per byte in the least time.

README.md lists what helped.
"""

from model import SpeedrunGPT
from target import StopAtTarget

from configs.gpt_stdlib import dataloader as dataloader
from configs.gpt_stdlib import graph as graph
from configs.gpt_stdlib import lr_scheduler as lr_scheduler
from configs.gpt_stdlib import optim as optim
from configs.gpt_stdlib import train
from libai.config import LazyCall

model = LazyCall(SpeedrunGPT)(
    vocab_size=257,
    max_seq_length="${dataloader.train.dataset.sequence_length}",
    hidden_size=96,
    num_layers=1,
    num_heads=4,
    num_previous=2,
)

train.output_dir = "out/speedrun"
train.train_micro_batch_size = 8
train.train_iter = 220
train.log_period = 50
train.checkpointer.enabled = False
train.evaluation.eval_period = 220
train.extra_hooks = [LazyCall(StopAtTarget)(target=1.98)]
