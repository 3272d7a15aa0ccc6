"""A saved config names code, so a run of another user is refused unless it is trusted."""

import os
from pathlib import Path

import pytest

from libai.cli import train_net
from libai.config import LazyConfig, load_config
from libai.config.loader import IMPORT_FROM
from libai.launch.command_line import parse_args
from libai.utils import ownership
from libai.utils.errors import UserError

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


@pytest.mark.parametrize(
    ("caller", "owners"),
    [
        (ALICE, {"run": BOB, "config.yaml": BOB}),
        (ALICE, {"config.yaml": BOB}),
        (ALICE, {"run": BOB}),
        (ROOT, {"run": BOB, "config.yaml": BOB}),
    ],
)
def test_the_run_of_another_user_is_refused_unless_it_is_trusted(run, users, caller, owners):
    users(caller, **owners)
    with pytest.raises(UserError, match=f"belongs to the user with id {BOB}.*add --trust"):
        LazyConfig.load(run / "config.yaml")
    assert LazyConfig.load(run / "config.yaml", trust=True).train.seed == 5


@pytest.mark.parametrize(
    ("caller", "owners"),
    [(ALICE, {"run": ALICE, "config.yaml": ALICE}), (ALICE, {}), (ROOT, {})],
)
def test_own_runs_and_runs_of_root_are_opened(run, users, caller, owners):
    """Negative control."""
    users(caller, **owners)
    assert LazyConfig.load(run / "config.yaml").train.seed == 5


def test_a_link_to_the_run_of_another_user_is_refused(run, users, tmp_path):
    (tmp_path / "mine").symlink_to(run)
    users(ALICE, mine=ALICE, run=BOB)
    with pytest.raises(UserError, match=f"belongs to the user with id {BOB}"):
        LazyConfig.load(tmp_path / "mine" / "config.yaml")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_of_code_that_others_may_have_replaced_is_refused(run, users, tmp_path, mode):
    shared = tmp_path / "shared"
    (shared / "code").mkdir(parents=True)
    shared.chmod(mode)
    (run / "config.yaml").write_text(f"{IMPORT_FROM}: [{shared / 'code'}]\ntrain: {{seed: 5}}\n")
    users(ALICE, code=BOB)
    with pytest.raises(UserError, match="code belongs to the user with id"):
        LazyConfig.load(run / "config.yaml")


def test_python_configs_are_programs_that_the_user_names(run, users):
    (run / "exp.py").write_text("train = dict(seed=5)\n")
    users(ALICE, **{"run": BOB, "exp.py": BOB})
    assert LazyConfig.load(run / "exp.py").train.seed == 5


@pytest.mark.parametrize("call", ["load_config", "predictor", "pipeline", "train_net"])
def test_every_way_to_open_a_run_refuses_and_trusts(run, users, monkeypatch, call):
    """Trusted, each of them goes on to the next mistake: the config has no model."""
    from libai.engine import Run
    from libai.inference import Pipeline

    def train(*, trust=False):
        words = ["train_net.py", str(run / "config.yaml"), *(["--trust"] if trust else [])]
        monkeypatch.setattr("sys.argv", words)
        train_net.main()

    opens = {
        "load_config": lambda **options: load_config(run / "config.yaml", **options),
        "predictor": lambda **options: Run.load(run, **options),
        "pipeline": lambda **options: Pipeline(run, **options),
        "train_net": train,
    }
    users(ALICE, run=BOB)
    with pytest.raises(UserError, match="belongs to the user"):
        opens[call]()
    with pytest.raises(UserError, match="the config has no model"):
        opens[call](trust=True)


@pytest.mark.parametrize("command", ["predict", "generate"])
def test_commands_pass_trust_on(run, monkeypatch, command):
    from libai.cli import main

    class Loaded(Exception):
        pass

    def load(*args, trust, **options):
        raise Loaded(trust)

    monkeypatch.setattr("sys.argv", ["libai"])
    monkeypatch.setattr("libai.inference.Pipeline", load)
    monkeypatch.setattr("libai.utils.distributed.prepare_device", lambda *_, **__: None)
    words = {"predict": [str(run), "--data", "val"], "generate": [str(run), "a prompt"]}[command]
    for flags in ([], ["--trust"]):
        with pytest.raises(Loaded) as caught:
            main.dispatch([command, *words, *flags])
        assert caught.value.args == (bool(flags),)
    assert parse_args(["exp.py", "--trust"]).trust


def test_a_real_owner_is_seen(run):
    try:
        os.chown(run / "config.yaml", BOB, -1)
    except PermissionError:
        pytest.skip("only root may give files away")
    with pytest.raises(UserError, match=f"belongs to the user with id {BOB}"):
        LazyConfig.load(Path(run, "config.yaml"))
