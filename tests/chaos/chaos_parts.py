"""A user's model, data and hook, copied next to the config. The hook plants a fault.

The environment variable CHAOS contains the fault as JSON (`chaos_faults.Fault`). It happens only
once: a file records it, so a restarted or resumed job is not disturbed.
"""

import json
import os
import signal
import sys
import time

import numpy as np
from oneflow import nn

from libai.engine import HookBase
from libai.utils.distributed import get_rank


def samples():
    rng = np.random.RandomState(0)
    return {"x": rng.randn(64, 8).astype("float32"), "y": rng.randint(0, 4, 64)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return {
            "losses": {"cls": nn.functional.cross_entropy(self.b(nn.functional.relu(self.a(x))), y)}
        }


class Disturbed(HookBase):
    """Causes the fault in CHAOS at its hook point, iteration and rank.

    Without CHAOS it only slows iterations down.
    """

    def __init__(self):
        self.fault = json.loads(os.environ.get("CHAOS", "{}"))
        if self.fault.get("rank") != get_rank() or os.path.exists(self._mark):
            self.fault = {}
        if self.fault.get("act") == "write":
            self._fail_a_write()

    _mark = property(lambda self: os.environ["CHAOS_MARK"])

    def before_train(self):
        self._strike("before_train")

    def before_step(self):
        self._strike("before_step")

    def after_step(self):
        time.sleep(0.02)  # so that signals arrive during training
        self._strike("after_step")

    def after_train(self):
        self._strike("after_train")

    def _strike(self, point):
        if self.fault.get("point") != point or self.trainer.iter < self.fault["iteration"]:
            return
        fault, self.fault = self.fault, {}
        open(self._mark, "w").close()
        act = fault["act"]
        if act == "raise":
            raise RuntimeError("planted by the campaign")
        if act == "memory":
            raise MemoryError
        if act == "exit":
            sys.exit(fault["code"])
        if act == "os_exit":
            os._exit(fault["code"])
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "abort":
            os.abort()
        if act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if act == "sleep":
            time.sleep(10_000)
        if act == "nan":
            next(self.trainer.model.parameters()).data.fill_(float("nan"))

    def _fail_a_write(self):
        """Make the numbered fsync kill the process or fail once."""
        calls = [0]
        fsync, fault = os.fsync, self.fault

        def failing(descriptor):
            calls[0] += 1
            if calls[0] == fault["call"] and not os.path.exists(self._mark):
                open(self._mark, "w").close()
                if fault["code"] == -1:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(fault["code"], os.strerror(fault["code"]))
            return fsync(descriptor)

        os.fsync = failing
