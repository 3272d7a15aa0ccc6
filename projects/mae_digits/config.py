"""A ViT that learns digits from a few labels, starting from the encoder of `mae_digits.py`."""

from few_labels import few_labels

from configs.common.digits_run import lr_scheduler as lr_scheduler
from configs.vit_digits import dataloader, optim, train
from configs.vit_digits import graph as graph
from configs.vit_digits import model as model
from libai.config import LazyCall

dataloader.train.dataset = LazyCall(few_labels)(num_per_class=2, seed=0)
dataloader.test.val.dataset.update(
    validation_fraction=0.2, seed=0
)  # the same split as in pre-training

optim.lr = 1e-3

train.output_dir = "out/mae_digits_labels"
train.load_weight = {"path": "out/mae_digits/checkpoints/last", "strict": False}
train.train_micro_batch_size = 10
train.train_iter = 300
train.checkpointer.period = 300
train.evaluation.eval_period = 300
