"""ResNet-18 for 32 x 32 colour images."""

from libai.config import LazyCall

model = LazyCall("libai.models.ResNet")(
    num_channels=3,
    num_classes=10,
    width=64,
    blocks_per_stage=[2, 2, 2, 2],
    stem="cifar",
)
