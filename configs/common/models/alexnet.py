"""AlexNet for 32 x 32 colour images."""

from libai.config import LazyCall

model = LazyCall("libai.models.AlexNet")(
    image_size=32,
    num_channels=3,
    num_classes=10,
    width=64,
    hidden_size=1024,
    dropout=0.5,
)
