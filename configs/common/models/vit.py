"""A small ViT for 8 x 8 grey images: 16 patches of 2 x 2 pixels."""

from libai.config import LazyCall

model = LazyCall("libai.models.ViT")(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_classes=10,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    mlp_ratio=4.0,
    dropout=0.0,
    drop_path=0.0,
)
