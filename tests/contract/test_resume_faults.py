"""Faults of a resume, which the comparison of `libai verify-resume` detects."""

import numpy as np
import pytest
from contract_runs import make_config
from toy import Classifier

from libai.config import validate
from libai.engine import default_setup
from libai.engine.hooks import RandomStateHook
from libai.engine.run import verify_resume
from libai.engine.run.run import Run
from libai.engine.run.verify_resume import compare, job_overrides, train
from libai.launch.stop import StoppedFromOutside
from libai.layers import Dropout

pytestmark = pytest.mark.e2e

ITERS = 3


class Drawing(Classifier):
    """Has seeded dropout and noise from NumPy's generator, so that every kind of randomness
    matters.
    """

    def __init__(self):
        super().__init__()
        self.dropout = Dropout(0.3)

    def forward(self, x, y):
        scale = 1.0 + 0.1 * float(np.random.rand()) if self.training else 1.0
        return Classifier.forward(self, self.dropout(x) * scale, y)


def part(folder, **options):
    overrides = [*job_overrides(ITERS, folder), "model._target_=test_resume_faults.Drawing"]
    train(default_setup(validate(make_config(folder, "eager", *overrides))), **options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    part(folder)
    return folder


def forget_generators(run):
    for hook in run.trainer.hooks:
        if isinstance(hook, RandomStateHook):
            hook.load_state_dict({"seeds_every_iteration": False, "seeded_at": None, "ranks": []})


def take_another_seed(run):
    run.trainer.parts.inputs.seed += 1


def step_the_schedule(run):
    run.lr_scheduler.step()


def skip_one_sample(run):
    position = run.train_loader.state_dict()
    run.train_loader.load_state_dict(
        {**position, "consumed_samples": position["consumed_samples"] + 1}
    )


FAULTS = [forget_generators, take_another_seed, step_the_schedule, skip_one_sample]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_is_noticed(fault, straight, tmp_path, monkeypatch):
    class Planted(Run):
        def train(self):
            fault(self)
            return Run.train(self)

    with pytest.raises(StoppedFromOutside):
        part(tmp_path, stop_after=ITERS)
    if fault is not None:
        monkeypatch.setattr(verify_resume, "Run", Planted)
    part(tmp_path, resume=True)
    found = compare(straight, tmp_path, ITERS)
    assert found.is_exact is (fault is None), found
