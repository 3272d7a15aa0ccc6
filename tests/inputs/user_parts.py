"""A user's valid and invalid parts, for the bad inputs."""

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine import HookBase


def samples(count=64, classes=4):
    rng = np.random.RandomState(0)
    return {"x": rng.randn(count, 8).astype("float32"), "y": rng.randint(0, classes, count)}


class Net(nn.Module):
    def __init__(self, width=4, classes=4):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, classes)

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(self.a(x)), y)}}


class NoParameters(nn.Module):
    def forward(self, x, y):
        return {"losses": {"cls": x.mean()}}


class Frozen(Net):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad = False


class Detached(Net):
    def forward(self, x, y):
        return {"losses": {"cls": super().forward(x, y)["losses"]["cls"].detach()}}


class NeedsMask(Net):
    def forward(self, x, y, mask):
        return super().forward(x, y)


class OtherShape(Net):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 4)


class ReturnsTensor(Net):
    def forward(self, x, y):
        return self.b(self.a(x))


class ReturnsFloat(Net):
    def forward(self, x, y):
        return {"losses": {"cls": 1.0}}


class ReturnsNone(Net):
    def forward(self, x, y):
        pass


class VectorLoss(Net):
    def forward(self, x, y):
        return {"losses": {"cls": self.b(self.a(x)).sum(dim=1)}}


class NoSuper(nn.Module):
    def __init__(self):
        self.a = nn.Linear(8, 4)


class NoForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)


class NotAModule:
    def __init__(self, width=4):
        self.width = width


def broken_bug(width=4):
    return {}["missing"]


class NotAHook:
    def after_step(self):
        pass


class Hook(HookBase):
    def __init__(self, period=1):
        self.period = period


class Evaluator:
    def process(self, batch, outputs):
        return {"n": 1.0}

    def compute(self, sums):
        return {"n": sums["n"]}


class NoProcess:
    def compute(self, sums):
        return {}


class NoCompute:
    def process(self, batch, outputs):
        return {"n": 1.0}


class ProcessOneArgument:
    def process(self, batch):
        return {"n": 1.0}

    def compute(self, sums):
        return {}


class ProcessReturnsNone:
    def process(self, batch, outputs):
        return None

    def compute(self, sums):
        return {}


class ComputeReturnsText:
    def process(self, batch, outputs):
        return {"n": 1.0}

    def compute(self, sums):
        return {"n": "many"}


class NoStep:
    def __init__(self, optimizer):
        pass


def a_number():
    return 7


def nothing():
    return None


def text():
    return "text"


def numbers():
    return [1, 2, 3]


def unequal():
    return {"x": np.zeros((4, 8), "float32"), "y": np.zeros(3, "int64")}


def strings():
    return {"x": np.array(["a"] * 64), "y": np.zeros(64, "int64")}


def float_labels():
    return {"x": np.zeros((64, 8), "float32"), "y": np.zeros(64, "float32")}


def wide():
    return {"x": np.zeros((64, 9), "float32"), "y": np.zeros(64, "int64")}


def empty():
    return {"x": np.zeros((0, 8), "float32"), "y": np.zeros(0, "int64")}


def only_x():
    return {"x": np.zeros((64, 8), "float32")}


class NoLength:
    def __getitem__(self, index):
        return {}


class ReturnsNumber:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return 1


class RaggedSamples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": np.zeros(8 + index % 2, "float32"), "y": 1}


class Zeros(Net):
    def __init__(self, length):
        super().__init__()
        self.positions = nn.Parameter(flow.zeros(length, 4))


class Bug(Net):
    def forward(self, x, y):
        return {}["missing"]
