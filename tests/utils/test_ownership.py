"""A saved config names code, so a run of another user is refused unless it is trusted."""

import contextlib
import os

import pytest
from refusals import refused

from libai.cli import train_net
from libai.cli.commands import benchmark, parity, verify_resume
from libai.config import LazyConfig, load_config
from libai.config.loader import IMPORT_FROM
from libai.utils import ownership


def verify_resume_on_a_rank(words):
    args = verify_resume.parse(words)
    args.phase = "straight"
    args.folder = "x"
    return verify_resume.run_job(args)


#: command that opens a config → its entry point
COMMANDS = {
    "train_net": lambda words: train_net.main(),
    "parity": parity.run,
    "benchmark": benchmark.run,
    "verify_resume": verify_resume_on_a_rank,
}

ALICE, BOB, ROOT = 4001, 4002, 0


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("train: {seed: 5}\n")
    return folder


@pytest.fixture
def users(monkeypatch):
    """Set who the caller is and which files belong to whom; all others belong to root."""

    def set_users(caller, **owners):
        monkeypatch.setattr(os, "geteuid", lambda: caller)
        monkeypatch.setattr(ownership, "owner_of", lambda path: owners.get(path.name, ROOT))

    return set_users


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    "caller, owners, is_refused",
    [
        (ALICE, {"run": BOB, "config.yaml": BOB}, True),
        (ALICE, {"config.yaml": BOB}, True),
        (ALICE, {"run": BOB}, True),
        (ROOT, {"run": BOB, "config.yaml": BOB}, True),
        (ALICE, {"run": ALICE, "config.yaml": ALICE}, False),
        (ALICE, {}, False),
        (ROOT, {}, False),
    ],
)
def test_only_the_runs_of_other_users_are_refused(run, users, caller, owners, is_refused, trust):
    users(caller, **owners)
    expected = contextlib.nullcontext()
    if is_refused and not trust:
        expected = refused(f"the user with id {BOB}, .* add --trust")
    with expected:
        assert LazyConfig.load(run / "config.yaml", trust=trust).train.seed == 5


def test_a_link_to_the_run_of_another_user_is_refused(run, users, tmp_path):
    (tmp_path / "mine").symlink_to(run)
    users(ALICE, mine=ALICE, run=BOB)
    with refused(f"belongs to the user with id {BOB}"):
        LazyConfig.load(tmp_path / "mine" / "config.yaml")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_of_code_that_others_may_have_replaced_is_refused(run, users, tmp_path, mode):
    shared = tmp_path / "shared"
    (shared / "code").mkdir(parents=True)
    shared.chmod(mode)
    (run / "config.yaml").write_text(f"{IMPORT_FROM}: [{shared / 'code'}]\ntrain: {{seed: 5}}\n")
    users(ALICE, code=BOB)
    with refused("code belongs to the user with id"):
        LazyConfig.load(run / "config.yaml")


def test_python_configs_are_programs_that_the_user_names(run, users):
    (run / "exp.py").write_text("train = dict(seed=5)\n")
    users(ALICE, **{"run": BOB, "exp.py": BOB})
    assert LazyConfig.load(run / "exp.py").train.seed == 5


@pytest.mark.parametrize("call", ["load_config", "predictor", "pipeline", *COMMANDS])
def test_every_way_to_open_a_run_refuses_and_trusts(run, users, monkeypatch, call):
    """Trusted, each of them goes on to the next mistake: the config has no model."""
    from libai.engine import Run
    from libai.inference import Pipeline

    def command(*, trust=False):
        words = [str(run / "config.yaml"), *(["--trust"] if trust else [])]
        monkeypatch.setattr("sys.argv", ["train_net.py", *words])
        COMMANDS[call](words)

    opens = {
        "load_config": lambda **options: load_config(run / "config.yaml", **options),
        "predictor": lambda **options: Run.load(run, **options),
        "pipeline": lambda **options: Pipeline(run, **options),
        **dict.fromkeys(COMMANDS, command),
    }
    users(ALICE, run=BOB)
    with refused("belongs to the user"):
        opens[call]()
    with refused("the config has no model"):
        opens[call](trust=True)
