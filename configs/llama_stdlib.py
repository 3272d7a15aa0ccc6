"""A Llama of 0.33 million weights on the source text of the Python standard library, byte by byte.

Needs no download and takes about a minute on two CPU cores. `configs/gpt_stdlib.py` explains the
losses.
"""

from .common.models.llama import model as model
from .gpt_stdlib import dataloader as dataloader
from .gpt_stdlib import graph as graph
from .gpt_stdlib import lr_scheduler as lr_scheduler
from .gpt_stdlib import optim as optim
from .gpt_stdlib import train

train.output_dir = "out/llama_stdlib"
