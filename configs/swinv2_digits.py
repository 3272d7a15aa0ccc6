"""A Swin V2 on handwritten digits of 8 x 8 pixels, with the sizes of the model in
`swin_digits.py`.
"""

from libai.config import LazyCall

from .swin_digits import dataloader as dataloader
from .swin_digits import graph as graph
from .swin_digits import lr_scheduler as lr_scheduler
from .swin_digits import model as _swin
from .swin_digits import optim as optim
from .swin_digits import train

model = LazyCall("libai.models.SwinV2")(
    **{name: value for name, value in _swin.items() if name != "_target_"}
)

train.output_dir = "out/swinv2_digits"
