"""PyTorch's names for OneFlow 0.9.0, and what a user's PyTorch file needs to train here.

`functions` (torch), `functional` (torch.nn.functional), `layers` and `transformer` (torch.nn),
`optimizers` and `schedules` (torch.optim), `data` (torch.utils.data) and `tensors` (methods) hold
one definition for each name that OneFlow lacks or defines differently; `names` is the table.
docs/pytorch.md is the page for users.
"""

from libai.config.torch_files import torch_files

with torch_files("libai.torch_names.task", "libai.torch_names.runner"):
    from libai.torch_names.task import TorchTask

__all__ = ["TorchTask", "torch_files"]
