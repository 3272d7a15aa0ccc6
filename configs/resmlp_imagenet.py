"""ResMLP-S12 on ImageNet's folders (`dataloader.train.dataset.path`): 300 epochs of AdamW, for
GPUs.
"""

from .common.data.imagenet import dataloader as dataloader
from .common.imagenet_run import graph as graph
from .common.imagenet_run import lr_scheduler as lr_scheduler
from .common.imagenet_run import optim as optim
from .common.imagenet_run import train
from .common.models.published import published as _published

model = _published["resmlp_s12"]

train.output_dir = "out/resmlp_imagenet"
