"""Image data shipped with libai: handwritten digits of 8 x 8 pixels, in 10 classes, with one
channel.
"""

from omegaconf import OmegaConf

from libai.config import LazyCall
from libai.data import DigitsDataset, build_eval_loader, build_train_loader

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(DigitsDataset)(
                split="train", validation_fraction=0.2, seed=0, augment=False
            ),
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(DigitsDataset)(
                    split="validation",
                    # the same split as for training, because otherwise the two datasets would
                    # overlap
                    validation_fraction="${....train.dataset.validation_fraction}",
                    seed="${....train.dataset.seed}",
                ),
            ),
        },
    }
)
