"""ImageNet, which you download yourself, or any images with one folder for each class.

`dataloader.train.dataset.path` and `dataloader.test.val.dataset.path` are the folders that contain
the class folders for training and for validation.
"""

from omegaconf import OmegaConf

from libai.config import LazyCall
from libai.data import ImageFolderDataset, build_eval_loader, build_train_loader

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(ImageFolderDataset)(
                path="imagenet/train", image_size=224, augment=True
            ),
            num_workers=4,
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(ImageFolderDataset)(
                    path="imagenet/val", image_size="${....train.dataset.image_size}"
                ),
            ),
        },
    }
)
