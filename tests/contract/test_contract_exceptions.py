"""The handling of exceptions in hooks and in runs (FEATURES A3 51, B 32)."""

import pytest
from contract_runs import make_config, make_run, train
from jobs import read_column

from libai.config import ConfigError, validate
from libai.engine.hooks import CallbackHook
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e

SHORT = ("train.evaluation.enabled=false", "train.checkpointer.period=100", "train.train_iter=6")


def raising(error, **options):
    def fail(trainer):
        raise error

    return CallbackHook(after_step=fail, **options)


def test_a_run_that_returns_after_a_failure_saves_says_so_and_resumes(mode, tmp_path):
    train(tmp_path / "plain", mode, *SHORT)
    run = make_run(tmp_path / "failing", mode, *SHORT, "train.on_exception=return")
    run.trainer.register_hooks([raising(RuntimeError("planted"), every=3)])
    result = run.train()
    assert (result.status, result.iterations, result.last_path.name) == (
        "failed",
        3,
        "iter_0000003",
    )
    assert "planted" in (tmp_path / "failing" / "log.txt").read_text()
    train(tmp_path / "failing", mode, *SHORT, resume=True)
    assert read_column(tmp_path / "failing") == read_column(tmp_path / "plain")


def test_by_default_and_for_a_user_error_the_error_is_raised(tmp_path):
    for error, policy in ((RuntimeError("planted"), "raise"), (UserError("a mistake"), "return")):
        run = make_run(tmp_path / policy, "eager", *SHORT, f"train.on_exception={policy}")
        run.trainer.register_hooks([raising(error)])
        with pytest.raises(type(error), match=str(error)):
            run.train()


def test_several_processes_cannot_return(tmp_path):
    config = make_config(tmp_path, "eager", "train.on_exception=return")
    with pytest.raises(
        ConfigError, match="train.on_exception=return does not work with 2 processes"
    ):
        validate(config, world_size=2)
