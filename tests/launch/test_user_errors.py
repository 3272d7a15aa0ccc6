"""A mistake of the user gives exit code 2 and one clear error on stderr: no traceback, no second line."""

from __future__ import annotations

import jobs
import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.user_folder(tmp_path_factory)


EAGER, GRAPH = "graph.enabled=false", "graph.enabled=true"
NO_LOSS = ("NoLoss.forward returned a dict with the keys ['logits'] and no 'losses'", 'return {"losses": {"cls": loss}')
MISTAKES = {
    "misspelt key": (["train.trian_iter=5"], ["train.trian_iter: no such setting", "Did you mean train.train_iter?"]),
    "sizes that do not divide": (
        ["train.train_micro_batch_size=3"],
        ["train.global_batch_size=8 is not a multiple of micro-batch", "Nearest: 6, 9"],
    ),
    "resume in an empty folder": (["--resume"], ["--resume found no usable checkpoint", "Leave --resume out"]),
    "unknown flag": (["--resum"], ["--resum: no such flag", "--resume"]),
    "no loss, eager": (["model._target_=user_models.NoLoss", EAGER], NO_LOSS),
    "no loss, graph": (["model._target_=user_models.NoLoss", GRAPH], NO_LOSS),
    "other batch keys, graph": (
        ["model._target_=user_models.OtherNames", GRAPH],
        ["the batch has the keys ['x', 'y'], but OtherNames.forward takes ['image', 'label']", "rename"],
    ),
    "a loader that yields nothing": (
        ["dataloader.train={_target_: user_models.no_batches}"],
        ["the training data loader (list) gave no batch", "dataset is empty"],
    ),
    "no training data": (["~dataloader.train"], ["dataloader.train is None", "Set dataloader.train"]),
    "an option the mode cannot honour": (
        ["train.amp.enabled=true", "train.device=cpu"],
        ["train.amp.enabled=true (fp16) cannot be honoured in eager mode on cpu", "Use train.amp.enabled=auto"],
    ),
}


#: a job of its own each; tests/inputs tries hundreds of mistakes within one process
QUICK = ("misspelt key", "resume in an empty folder", "no loss, eager", "other batch keys, graph")


@pytest.mark.parametrize(
    "arguments, texts",
    [pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, case in MISTAKES.items()],
)
def test_a_mistake_is_one_clear_error(folder, arguments, texts):
    result = jobs.train_net("user_config.py", *arguments, cwd=folder)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stdout + result.stderr, result
    assert len(result.errors) == 1, result
    assert result.errors[0].startswith("error: ") and "error: rank" not in result.errors[0], result
    for text in texts:
        assert text in result.errors[0], result


def test_several_mistakes_are_reported_together(folder):
    result = jobs.train_net("user_config.py", "train.trian_iter=5", "train.seed=abc", "model.wdith=3", cwd=folder)
    assert result.returncode == 2
    for text in ("trian_iter", "train.seed=abc", "wdith"):
        assert text in result.stderr, result
    assert result.stderr.count("error:") == 1, result


def test_an_error_of_the_users_code_keeps_its_traceback(folder):
    """Negative control: a bug is no mistake in the config. It needs the place, and exit code 1."""
    hook = "train.extra_hooks=[{_target_: user_models.FailsOnRank, rank: 0}]"
    result = jobs.train_net("user_config.py", hook, cwd=folder)
    assert result.returncode == 1, result
    assert "Traceback" in result.stderr and "RuntimeError: planted on one rank" in result.stderr, result
    assert "in after_step" in result.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    "arguments, text",
    [
        (["train.global_batch_size=7"], "train.global_batch_size=7 is not a multiple"),
        (["model._target_=user_models.NoLoss", GRAPH], "NoLoss.forward returned a dict"),
    ],
)
def test_two_ranks_report_a_mistake_once(folder, arguments, text):
    result = jobs.train_sh("user_config.py", 2, "train.train_micro_batch_size=4", *arguments, cwd=folder)
    assert result.returncode == 2, result
    assert len([line for line in result.errors if text in line]) == 1, result
    assert len(result.errors) <= 3 and "Traceback" not in result.stderr, result
