"""Negative controls of `libai verify-resume`: each fault is detected."""

from __future__ import annotations

import contract_runs
import numpy as np
import pytest
import toy

from libai.cli.commands import verify_resume as command
from libai.config import validate
from libai.engine import default_setup
from libai.engine.run.verify_resume import compare, job_overrides, train
from libai.launch.stop import StoppedFromOutside
from libai.layers import Dropout
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e

ITERS = 3


class Drawing(toy.Classifier):
    """Draws masks by the seed and noise from NumPy's generator, so that every kind of randomness matters."""

    def __init__(self):
        super().__init__()
        self.dropout = Dropout(0.3)

    def forward(self, x, y):
        scale = 1.0 + 0.1 * float(np.random.rand()) if self.training else 1.0
        return toy.Classifier.forward(self, self.dropout(x) * scale, y)


def part(folder, *overrides, **options):
    overrides = [*job_overrides(ITERS, folder), "model._target_=test_resume_faults.Drawing", *overrides]
    train(default_setup(validate(contract_runs.make_config(folder, "eager", *overrides))), **options)


def resumed(folder, *overrides, fault):
    with pytest.raises(StoppedFromOutside):
        part(folder, *overrides, stop_after=ITERS)
    part(folder, *overrides, resume=True, fault=fault)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    part(folder)
    return folder


@pytest.mark.parametrize("fault", [None, *command.FAULTS])
def test_a_control_is_noticed(fault, straight, tmp_path):
    resumed(tmp_path, fault=fault)
    found = compare(straight, tmp_path, ITERS)
    assert found.is_exact is (fault is None), found


def test_a_control_that_changes_nothing_is_refused(tmp_path, monkeypatch):
    part(tmp_path / "straight", "lr_scheduler=null")
    resumed(tmp_path / "resumed", "lr_scheduler=null", fault="scheduler")
    monkeypatch.setattr(command, "start_job", lambda *arguments: 0)
    with pytest.raises(UserError, match="--fault scheduler changes nothing in this config"):
        command.certify(command.parse(["config.py", "--fault", "scheduler", "--iters", str(ITERS)]), tmp_path)
