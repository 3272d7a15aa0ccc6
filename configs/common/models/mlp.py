"""An MLP with two hidden layers for 8 x 8 grey images."""

from libai.config import LazyCall

model = LazyCall("libai.models.MLP")(
    input_size=64, hidden_sizes=[128, 128], num_classes=10, dropout=0.0
)
