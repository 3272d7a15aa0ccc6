"""A user's model, data, hook and evaluator for planted_config.py, which plant one fault.

The environment variable FAULT holds the fault as JSON (`fault_jobs.Fault`). The file FAULT_MARK
says that it has happened: a job that starts again is not disturbed.
"""

import ctypes
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
from oneflow import nn

from libai.engine import HookBase
from libai.evaluation import Evaluator
from libai.layers import Dropout
from libai.utils.distributed import get_rank

FAULT = json.loads(os.environ.get("FAULT", "{}"))
MARK = os.environ.get("FAULT_MARK", "")
#: process id of the launcher, to which a person or a scheduler sends signals
LAUNCHER = int(os.environ.get("LAUNCHER", "0"))
#: signals of a request to stop, one for each point
STOPS = {"step": signal.SIGTERM, "save": signal.SIGINT, "evaluation": signal.SIGHUP}
WORKERS = []
#: signals that this process has handled
ARRIVED = []


def come_to(point):
    """Cause the fault if this is its rank and the numbered visit of its point."""
    if (FAULT.get("point"), FAULT.get("rank")) != (point, get_rank()) or os.path.exists(MARK):
        return
    FAULT["visit"] -= 1
    if FAULT["visit"] == 0:
        if FAULT["act"] != "nan":  # that happens at each restart
            Path(MARK).touch()
        ACTS[FAULT["act"]]()


# ----------------------------------------------------------------------------------------------
# the acts


def fail():
    # as the worker of a loader: it must not outlive the job
    WORKERS.append(subprocess.Popen(["sleep", "600"]))
    raise RuntimeError("planted")


def hang():
    time.sleep(1000)


def deadlock():
    """Hang in native code that holds the interpreter's lock."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def freeze():
    """Stop this process and its parent, so that neither can answer."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def crash():
    ctypes.string_at(0)


def send(signum):
    """Send a signal to the launcher, and return once it has been passed on to this process."""
    if threading.current_thread() is threading.main_thread():
        watch_signals()
    os.kill(LAUNCHER, signum)
    while not ARRIVED:
        time.sleep(0.01)


def watch_signals():
    """Note the signals that are handled here. Before a run can stop, they end the process."""

    def note(handler, signum, frame):
        ARRIVED.append(signum)
        handler(signum, frame)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(signum)
        if callable(handler):
            signal.signal(signum, partial(note, handler))


def stop():
    send(STOPS.get(FAULT["point"], signal.SIGTERM))


def press_twice():
    """Press Ctrl-C, and again after the half second in which it counts as one."""
    send(signal.SIGINT)
    time.sleep(0.6)
    os.kill(LAUNCHER, signal.SIGINT)
    time.sleep(1000)


def fill_disk():
    """Files may not grow beyond a size. At a step even the launcher's notes do not fit."""
    size = 8 if FAULT["point"] == "step" else 1500
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def corrupt():
    next(Planted.trained.model.parameters()).data.fill_(float("nan"))


def change_alone():
    """Change a setting that is compiled into the graph, on this rank only."""
    Planted.trained.optimizer.param_groups[0]["weight_decay"] = 0.5


ACTS = {
    "change": change_alone,
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(0),
    "leave": lambda: os._exit(0),
    "crash": crash,
    "hang": hang,
    "deadlock": deadlock,
    "freeze": freeze,
    "stop": stop,
    "ctrl-c twice": press_twice,
    "time limit": lambda: time.sleep(1.5),
    "full disk": fill_disk,
    "nan": corrupt,
    "launcher": lambda: os.kill(LAUNCHER, signal.SIGKILL) or time.sleep(1000),
}


# ----------------------------------------------------------------------------------------------
# the points


def samples(count=60):
    come_to("build")
    rng = np.random.RandomState(0)
    return {"x": rng.randn(count, 8).astype("float32"), "y": rng.randint(0, 4, count)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.dropout, self.b = nn.Linear(8, 16), Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x, y):
        logits = self.b(self.dropout(nn.functional.relu(self.a(x))))
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y)}}


class StruckModel(Model):
    """The model of a fault in forward.

    Otherwise forward must not reach what counts visits: a rank compiles a graph again for it.
    """

    def forward(self, x, y):
        come_to("compile" if x.is_lazy else "forward")
        return super().forward(x, y)


class Planted(HookBase):
    """Comes to the points of a run, and draws numbers as augmentation of the user's would."""

    trained = None

    def __init__(self):
        # rank 0 writes: it comes to the save between two files of a checkpoint
        fsync = os.fsync

        def interrupted(descriptor):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.parent.parent.name == "checkpoints":
                come_to("save")
            return fsync(descriptor)

        os.fsync = interrupted

    def before_train(self):
        Planted.trained = self.trainer
        watch_signals()  # a background thread, which writes checkpoints, cannot do so
        print(f"rank {get_rank()} speaking", flush=True)
        logging.getLogger("libai.user").info("rank %d is logging", get_rank())

    def before_step(self):
        come_to("step")

    def after_step(self):
        with open(f"draws_{get_rank()}.jsonl", "a") as file:
            draw = {"iter": self.trainer.iter, "draw": [random.random(), np.random.random()]}
            print(json.dumps(draw), file=file)

    def before_save(self, extra):
        if get_rank() > 0:
            come_to("save")


class Counted(Evaluator):
    """Counts samples, and comes to a point with each batch."""

    def process(self, batch, outputs):
        come_to("evaluation")
        return {"samples": len(batch["y"])}

    def compute(self, sums):
        return {"samples": sums["samples"]}
