"""An mT5 of 0.5 million weights that restores missing spans of the Python standard library's source
text, byte by byte.

It is T5 with gated units and with an output layer that is not tied to the embedding.
"""

from .t5_stdlib import dataloader as dataloader
from .t5_stdlib import graph as graph
from .t5_stdlib import lr_scheduler as lr_scheduler
from .t5_stdlib import model, train
from .t5_stdlib import optim as optim

model.tie_head = False

train.output_dir = "out/mt5_stdlib"
