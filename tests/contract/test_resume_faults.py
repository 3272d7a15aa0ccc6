"""The negative controls of `libai verify-resume`: each is noticed."""

from __future__ import annotations

import contract_runs
import numpy as np
import pytest
import toy

from libai.cli.commands import verify_resume as command
from libai.config import validate
from libai.engine import default_setup
from libai.engine.run.verify_resume import Rehearsal, compare, is_exact, job_overrides
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


def rehearse(folder, model="Drawing", **options):
    module = {"Drawing": "test_resume_faults", "Classifier": "toy"}[model]
    overrides = [*job_overrides(ITERS, folder), f"model._target_={module}.{model}"]
    run = default_setup(validate(contract_runs.make_config(folder, "eager", *overrides)))
    return Rehearsal(run, **options)


def first_half(folder, model="Drawing"):
    with pytest.raises(StoppedFromOutside):
        rehearse(folder, model, stop_after=ITERS).train()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    rehearse(folder).train()
    return folder


@pytest.mark.parametrize("fault", [None, *command.FAULTS])
def test_a_control_is_noticed(fault, straight, tmp_path):
    first_half(tmp_path)
    rehearse(tmp_path, resume=True, fault=fault).train()
    findings = compare(straight, tmp_path, ITERS)
    assert is_exact(findings) is (fault is None), findings


def test_a_control_that_changes_nothing_is_refused(tmp_path, monkeypatch):
    rehearse(tmp_path / "straight", "Classifier").train()
    first_half(tmp_path / "resumed", "Classifier")
    rehearse(tmp_path / "resumed", "Classifier", resume=True, fault="seed").train()
    monkeypatch.setattr(command, "start_job", lambda *arguments: 0)
    with pytest.raises(UserError, match="--fault seed changes nothing in this config"):
        command.certify(command.parse(["config.py", "--fault", "seed", "--iters", str(ITERS)]), tmp_path)
