"""A wheel works without the repository: it is installed into an environment that has only libai's
dependencies.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import jobs
import pytest
from jobs import ROOT, read_column

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

CONFIG = """
from configs.mlp_digits import dataloader, graph, lr_scheduler, model, optim, train

model.hidden_sizes = [12]
train.output_dir = "own"
train.train_iter = 4
train.log_period = 2
"""
#: files that only the repository has, in a string or docstring
REPOSITORY_FILE = re.compile(r"(?<![\w/])(?:tools|tests|docs/dev|projects|requirements)/\w[\w./-]*")
#: pip refuses the Pythons that launch/__init__.py refuses, and installation.py chooses its text
ONLY_IN_A_CLONE = {"libai/launch/__init__.py", "libai/utils/installation.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the repository, because building writes into the source."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "out", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = jobs.run([*command, "-w", str(folder), str(folder / "source")], cwd=folder)
    assert done.returncode == 0, done
    shutil.rmtree(folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the `bin` folder of an environment with the wheel and libai's dependencies.

    A `.pth` file adds the packages of this environment without their own `.pth` files, so that an
    editable installation of the repository is not importable.
    """
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    done = jobs.run([str(word) for word in command], cwd=folder)
    assert done.returncode == 0, done
    return folder / "bin"


def run(installed, folder, *words):
    path = f"{installed}:{os.environ['PATH']}"
    done = jobs.run([str(installed / "libai"), *words], cwd=folder, PATH=path, PYTHONPATH="")
    assert str(ROOT) not in done.stdout + done.stderr, done
    return done


def test_a_shipped_config_and_one_of_the_user_are_trained(installed, tmp_path):
    small = ["train.train_iter=4", "train.device=cpu"]
    done = run(installed, tmp_path, "train", "mlp_digits", *small)
    assert done.returncode == 0, done
    (tmp_path / "own.py").write_text(CONFIG)
    for settings in ([], ["-n", "2", "graph.enabled=true"]):
        done = run(installed, tmp_path, "train", "own.py", "train.device=cpu", *settings)
        assert done.returncode == 0, done
        assert list(read_column(tmp_path / "own")) == [2, 4]


def test_doctor_finds_nothing_missing(installed, tmp_path):
    done = run(installed, tmp_path, "doctor")
    assert done.returncode == 0, done


def test_a_mistake_is_explained_with_files_of_the_installation(installed, tmp_path):
    done = run(installed, tmp_path, "train", "mlp_digits", "train.train_itr=1")
    assert done.returncode == 2 and "train.train_iter" in done.stderr, done


def test_the_wheel_names_no_file_of_the_repository(wheel):
    found = {}
    with zipfile.ZipFile(wheel) as files:
        pages = {name for name in files.namelist() if name.startswith("libai/docs/")}
        assert "libai/docs/config.md" in pages and "libai/py.typed" in files.namelist()
        modules = {name for name in files.namelist() if name.endswith(".py")} - ONLY_IN_A_CLONE
        for name in modules:
            if not name.startswith("libai/configs/"):
                found[name] = messages_with_files(files.read(name).decode())
    assert {name: texts for name, texts in found.items() if texts} == {}


def messages_with_files(source):
    """Return the strings of a module that name a file of the repository, except docstrings."""
    tree = ast.parse(source)
    docstrings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]
    return [text for text in strings if REPOSITORY_FILE.search(text) and " " in text]


def test_a_message_with_a_file_would_be_found():
    """Negative control."""
    assert messages_with_files('raise ValueError("run tools/env.sh first")')
    assert not messages_with_files('"""See tools/env.sh."""\nx = "see docs/config.md"')
