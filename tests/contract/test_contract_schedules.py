"""Lists of schedules and schedules of the momentum, by iteration and by epoch.

With 44 samples in batches of 8, an epoch has 5.5 iterations.
"""

import oneflow as flow
import pytest
from contract_runs import make_run_with
from jobs import read_column
from refusals import refused

from libai.config import LazyCall
from libai.engine.hooks import CallbackHook
from libai.scheduler import WarmupConstantLR, WarmupCosineLR, WarmupLinearLR, WarmupStepLR

pytestmark = pytest.mark.e2e


def make_run(output_dir, mode, *overrides, **sections):
    return make_run_with(sections, output_dir, mode, *overrides)


def learning_rates(output_dir, mode, *overrides, **sections):
    make_run(output_dir, mode, *overrides, **sections).train()
    return list(read_column(output_dir, "train/lr").values())


def test_schedules_follow_one_another_by_iteration(mode, tmp_path):
    parts = [LazyCall(WarmupConstantLR)(max_iter=3, warmup_factor=0.5), LazyCall(WarmupLinearLR)()]
    found = learning_rates(tmp_path, mode, "train.warmup_ratio=0.25", lr_scheduler=parts)
    # a warm-up of 2 iterations in the first part only; the last one has the 5 iterations that are
    # left
    assert found == pytest.approx([0.005, 0.0075, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002])


def test_schedules_follow_one_another_by_epoch(mode, tmp_path):
    parts = [
        LazyCall(WarmupConstantLR)(
            max_epoch=1, warmup_epoch=0.5, warmup_factor=0.0, warmup_method="constant"
        ),
        LazyCall(WarmupStepLR)(step_size=1, gamma=0.5, by="epoch"),
    ]
    found = learning_rates(
        tmp_path, mode, "train.train_epoch=3", "train.train_iter=0", lr_scheduler=parts
    )
    assert found == pytest.approx(
        [0.0] * 3 + [0.01] * 3 + [0.01] * 6 + [0.005] * 5
    )  # 3, 6 and 12 of 17 iterations


def test_the_momentum_follows_its_schedule_or_is_refused(mode, tmp_path):
    sections = {
        "optim": LazyCall(flow.optim.SGD)(lr=0.1, momentum=0.8),
        "momentum_scheduler": LazyCall(WarmupLinearLR)(end_factor=0.5),
    }
    if mode == "graph":
        with refused("momentum_scheduler cannot be honoured in graph mode .*a constant"):
            make_run(tmp_path, mode, **sections)
        return
    run = make_run(tmp_path, mode, "lr_scheduler=null", **sections)
    seen = []
    run.trainer.register_hooks(
        [CallbackHook(before_step=lambda _: seen.append(run.optimizer.param_groups[0]["momentum"]))]
    )
    run.train()
    assert seen == pytest.approx([0.8 * (1 - step / 16) for step in range(8)])


@pytest.mark.parametrize(
    "sections, text",
    [
        (
            {"lr_scheduler": [LazyCall(WarmupConstantLR)(), LazyCall(WarmupCosineLR)()]},
            r"lr_scheduler\[0\] has no length, .* Set its max_iter \(iterations\) or max_epoch \(epochs\)",  # noqa: E501
        ),
        (
            {"lr_scheduler": [LazyCall(WarmupConstantLR)(max_epoch=2), LazyCall(WarmupCosineLR)()]},
            "part 1 of the list of schedules would begin after 11 iterations, but the run has 8",
        ),
        (
            {"lr_scheduler": [LazyCall(flow.optim.lr_scheduler.StepLR)(step_size=2)]},
            "part 0 of the list of schedules is a StepLR, but only schedules of libai.scheduler",
        ),
        (
            {"momentum_scheduler": LazyCall(flow.optim.lr_scheduler.StepLR)(step_size=2)},
            "momentum_scheduler is a StepLR, but only schedules of libai.scheduler can be combined",
        ),
        (
            {
                "momentum_scheduler": LazyCall(WarmupCosineLR)(),
                "optim": LazyCall(flow.optim.SGD)(lr=0.1),
            },
            "a momentum schedule needs an optimizer with momentum: use SGD with momentum",
        ),
        (
            {"momentum_scheduler": LazyCall(WarmupConstantLR)(warmup_factor=2.0, warmup_iter=2)},
            "this schedule multiplies the momentum by 2 at iteration 0",
        ),
        (
            {"lr_scheduler": LazyCall(WarmupConstantLR)(warmup_iter=2, warmup_epoch=1)},
            r"warmup_epoch=1 and a warm-up of 2 iterations .* mean the same",
        ),
    ],
)
def test_impossible_schedules_are_refused(sections, text, tmp_path):
    with refused(text):
        make_run(tmp_path, "eager", **sections)
