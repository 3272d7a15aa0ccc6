import pytest

from libai.config import Args, parse_args
from libai.utils.errors import UserError


def test_words_and_flags_may_be_mixed():
    args = parse_args(["--resume", "exp.py", "train.seed=1", "--dry-run", "~train.seed", "+a.b=-1"])
    assert args == Args(
        "exp.py", ["train.seed=1", "~train.seed", "+a.b=-1"], resume=True, dry_run=True
    )


def test_the_config_may_be_named_by_a_flag():
    assert parse_args(["train.seed=1", "--config-file", "exp.py"]) == Args(
        "exp.py", ["train.seed=1"]
    )


@pytest.mark.parametrize(
    "argv, text",
    [
        (["exp.py", "--resum"], "--resum: unknown flag. Did you mean --resume?"),
        (
            ["exp.py", "--fast_dev_run"],
            "--fast_dev_run: unknown flag. Did you mean --fast-dev-run?",
        ),
        (["exp.py", "--dry-run=true"], "takes no value"),
        (
            ["exp.py", "--dry-run", "--eval-only"],
            "--dry-run, --eval-only and --find-lr cannot be combined.",
        ),
        (
            ["exp.py", "--train.amp.enabled=true"],
            "--train.amp.enabled=true: overrides are written key=value, without dashes: "
            "train.amp.enabled=true",
        ),
        (["train.seed=1"], "No config file is given."),
        ([], "No config file is given."),
        (["exp.py", "--config-file"], "argument --config-file: expected one argument."),
    ],
)
def test_mistakes_are_explained(argv, text):
    with pytest.raises(UserError) as caught:
        parse_args(argv)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "argv, asked",
    [
        (["exp.py"], False),
        (["exp.py", "--find-lr", "train.seed=1"], "1e-7,10,100"),
        (["exp.py", "--find-lr", "1e-5,1,50"], "1e-5,1,50"),
    ],
)
def test_a_range_of_rates_may_follow_find_lr(argv, asked):
    assert parse_args(argv).find_lr == asked


@pytest.mark.parametrize(
    "argv, resume, reset",
    [
        (["exp.py", "--resume"], True, ()),
        (["--resume", "exp.py"], True, ()),
        (["exp.py", "--resume", "train.seed=1"], True, ()),
        (["exp.py", "--resume", "out/a/checkpoints/best"], "out/a/checkpoints/best", ()),
        (["exp.py", "train.seed=1", "--resume=out/a"], "out/a", ()),
        (
            ["--config-file", "exp.py", "--resume", "out/a", "--reset", "optimizer,data"],
            "out/a",
            ("optimizer", "data"),
        ),
        (["exp.py", "--resume", "--reset=schedule"], True, ("schedule",)),
        (
            ["exp.py", "--resume", "out/a", "--reset", "data", "--resume", "--reset="],
            True,
            (),
        ),  # a restart
    ],
)
def test_resume_may_name_a_checkpoint_and_reset_parts(argv, resume, reset):
    args = parse_args(argv)
    assert (args.config, args.resume, args.reset) == ("exp.py", resume, reset)
