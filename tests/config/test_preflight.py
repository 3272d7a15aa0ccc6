import subprocess
import sys

import pytest
from refusals import refused

from libai.cli import launch
from libai.launch import job

CONFIG = "raise SystemExit('the launcher must not execute a config')"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--resum"], "--resum: unknown flag. Did you mean --resume?"),
        (["train.seed=1", "++train.seed=2"], "train.seed is given twice, as 1 and as 2."),
        (["--dry-run", "--eval-only"], "cannot be combined"),
        (["--max-restarts", "often"], "--max-restarts is 'often'"),
    ],
)
def test_mistakes_in_the_arguments_are_found_before_any_process_starts(
    tmp_path, monkeypatch, arguments, text
):
    (tmp_path / "exp.py").write_text(CONFIG)
    monkeypatch.setattr(launch, "run_job", lambda *_, **__: pytest.fail("a job was started"))
    with refused(text.partition("?")[0].replace("'", ".")):
        launch.run([job.TRAINING, str(tmp_path / "exp.py"), "2", *arguments])


def test_importing_the_package_does_not_import_oneflow():
    code = "import sys, libai.config; sys.exit('oneflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_launcher_and_its_reader_use_the_standard_library_only():
    code = (
        "import sys, libai.cli.launch, libai.cli.training; "
        "sys.exit(str({'oneflow', 'numpy', 'omegaconf', 'hydra'} & set(sys.modules) or 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.stderr == "0\n"
