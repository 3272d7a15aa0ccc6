"""CIFAR-10 in the binary version, which you download yourself: `dataloader.train.dataset.path` is
the folder.

CIFAR-100: `dataloader.train.dataset.name=cifar100` and 100 classes for the model.
"""

from omegaconf import OmegaConf

from libai.config import LazyCall
from libai.data import CifarDataset, build_eval_loader, build_train_loader

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            # path=None looks in $LIBAI_DATA_DIR or ~/.cache/libai.
            dataset=LazyCall(CifarDataset)(path=None, name="cifar10", split="train", augment=True),
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(CifarDataset)(
                    path="${....train.dataset.path}",
                    name="${....train.dataset.name}",
                    split="test",
                ),
            ),
        },
    }
)
