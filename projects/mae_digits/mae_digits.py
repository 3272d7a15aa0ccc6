"""An MAE on handwritten digits of 8 x 8 pixels: it learns to predict 8 of 16 patches, without
labels.

Predicting the mean image gives a loss of 0.073, where training stays for the first 300 iterations.

To train `configs/vit_digits.py` from these weights, set `train.load_weight.strict=false` and set
`train.load_weight.path` to the folder of a checkpoint in `out/mae_digits/checkpoints`.
"""

from mae import MAE

from configs.vit_digits import dataloader as dataloader
from configs.vit_digits import graph as graph
from configs.vit_digits import lr_scheduler as lr_scheduler
from configs.vit_digits import optim, train
from libai.config import LazyCall

model = LazyCall(MAE)(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    decoder_hidden_size=32,
    decoder_num_layers=1,
    decoder_num_heads=4,
    mask_ratio=0.5,
    normalizes_patches=False,
    norm_eps=1e-5,
)

optim.lr = 2e-3

train.output_dir = "out/mae_digits"
train.evaluation.evaluators = {}
train.evaluation.eval_metric = "val/loss"
train.evaluation.eval_mode = "min"
train.train_iter = 1000
