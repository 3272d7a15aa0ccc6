"""Train the autoencoder on the handwritten digits, which takes a few seconds on one CPU core."""

from autoencoder import Autoencoder, PSNREvaluator

from configs.common.data.digits import dataloader as dataloader
from configs.common.graph import graph as graph
from configs.common.optim import optim
from configs.common.train import train
from libai.config import LazyCall

model = LazyCall(Autoencoder)(input_size=64, hidden_size=64, code_size=8, sparsity=0.0)

optim.lr = 3e-3
lr_scheduler = LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.01)

train.output_dir = "out/autoencoder_digits"
train.global_batch_size = 32
train.test_micro_batch_size = 120
train.train_iter = 600
train.warmup_ratio = 0.05
train.log_period = 100
train.checkpointer.period = 300
train.evaluation.eval_period = 200
train.evaluation.evaluators = {"psnr": LazyCall(PSNREvaluator)()}
train.evaluation.eval_metric = "val/psnr"
train.evaluation.eval_mode = "max"
