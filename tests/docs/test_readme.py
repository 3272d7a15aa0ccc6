"""README and docs are correct: their model trains and switches in both modes; their commands and
paths work.
"""

import functools
import re
from contextlib import contextmanager

import jobs
import numpy as np
import pytest
from jobs import read_column
from numpy.testing import assert_allclose

from libai.config import ConfigError, load_config, parse_args

ROOT = jobs.ROOT
FOLDERS = ("", "docs/", "docs/dev/", "docs/migrate/", "projects/*/")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
REPOSITORY_PATH = re.compile(
    r"(?<![\w/.-])((?:tools|configs|docs|libai|tests|projects)/[\w./-]*[\w/])(?![\w*…<{])"
)
PLACEHOLDERS = ("NAME", "NNNN", "configs/my", "<")


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(text, language):
    """Return the contents of the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def file_shown(page, after):
    """Return the first Python block of `page` after the first occurrence of a text."""
    text = (ROOT / page).read_text()
    return blocks(text[text.index(after) :], "python")[0]


def missing_paths(text):
    """Return the repository paths in a text that do not exist.

    The beginning of a file name is enough.
    """
    found = {
        path
        for path in REPOSITORY_PATH.findall(text)
        if not any(mark in path for mark in PLACEHOLDERS)
    }
    return sorted(path for path in found if not any(ROOT.glob(path.rstrip("/") + "*")))


def broken_links(page, text):
    """Return the relative links of a page to missing headings, missing files and files outside the
    repository.
    """
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        is_inside = target.resolve().is_relative_to(ROOT)
        if not is_inside or not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    return broken


def headings(page):
    """Return the anchors of a page's headings in GitHub's form."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_command(words):
    """Raise `ConfigError` if a documented command would be refused before it starts."""
    file, config, processes, *arguments = words
    assert (ROOT / file).is_file()
    args = parse_args([str(ROOT / config), *arguments])
    load_config(args.config, args.overrides, int(processes))


# ------------------------------------------------------------------------------------ the own model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the files of docs/quickstart.md in a folder outside the repository, and return the
    folder.
    """
    folder = tmp_path_factory.mktemp("own")
    for name in ("my_model.py", "my_config.py"):
        (folder / name).write_text(file_shown("docs/quickstart.md", f"`{name}`"))
    (folder / "predict.py").write_text(file_shown("docs/quickstart.md", "`predict.py`"))
    (folder / "my_hooks.py").write_text(file_shown("docs/training.md", "### Writing a hook"))
    (folder / "my_trainer.py").write_text(
        file_shown("docs/training.md", "### A training step of your own")
    )
    (folder / "my_train.py").write_text(file_shown("docs/training.md", "here `my_train.py`"))
    (folder / "switch.py").write_text(file_shown("docs/modes.md", "## Switch during a run"))
    return folder


@pytest.fixture
def train(worker, folder):
    """`train(name, …)` trains the config of docs/quickstart.md, with the output folder `name`."""
    return functools.partial(train_own, worker, folder)


def train_own(worker, folder, name, *overrides):
    settings = [
        f"train.output_dir={name}",
        "train.train_iter=60",
        "train.log_period=1",
        "train.evaluation.eval_period=30",
    ]
    result = worker.train_net("my_config.py", *settings, *overrides, cwd=folder)
    assert result.returncode == 0 and not result.errors, result
    return result


def assert_same_curve(first, second):
    for tag in ("train/loss", "eval/val/mse"):
        expected, found = read_column(first, tag), read_column(second, tag)
        assert expected and list(expected) == list(found), tag
        # measured: equal bits; 1e-5 is what docs/guarantees.md promises
        assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5, err_msg=tag)


@pytest.mark.promise
def test_the_own_model_trains_alike_in_both_modes(train, folder):
    train("eager", "graph.enabled=false")
    train("graph", "graph.enabled=true")
    losses = read_column(folder / "eager")
    assert losses[60] < 0.5 * losses[1]
    assert_same_curve(folder / "eager", folder / "graph")


@pytest.mark.e2e
def test_the_hook_of_the_docs_runs(train):
    result = train("hook", "train.extra_hooks=[{_target_: my_hooks.PrintLoss, every: 20}]")
    printed = re.findall(r"^after (\d+): \d\.\d{4}$", result.stdout, re.MULTILINE)
    assert printed == ["20", "40", "60"]


@pytest.mark.e2e
def test_the_own_step_of_the_docs_trains_a_run(worker, folder):
    words = ["my_train.py", "my_config.py", "train.output_dir=own", "train.train_iter=20"]
    result = worker.run(*words, cwd=folder)
    assert "done after 20 iterations" in result.stdout, result


@pytest.mark.e2e
def test_the_switch_of_the_docs_continues_the_curve(worker, folder):
    result = worker.run("switch.py", cwd=folder)
    assert result.returncode == 0, result
    assert "switched from eager to graph mode after iteration 200" in result.stdout, result
    whole = worker.train_net("my_config.py", "train.output_dir=whole", cwd=folder)
    assert whole.returncode == 0, whole
    assert_same_curve(folder / "whole", folder / "out/wave")
    result = worker.run("predict.py", cwd=folder)
    assert result.stdout.startswith("tensor([[0."), result


@pytest.mark.e2e
def test_the_ported_libai_project_trains_alike_in_both_modes(tmp_path, worker):
    for name in ("my_model.py", "my_data.py", "my_config.py"):
        (tmp_path / name).write_text(file_shown("docs/migrate/from_libai.md", f"Here, `{name}`"))
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        labels = random.integers(0, 10, 256)
        images = random.normal(size=(256, 64))
        images[:, :10] += 4 * np.eye(10)[labels]
        np.savez(tmp_path / f"{split}.npz", images=images, labels=labels)
    for name in ("false", "true"):
        settings = [
            f"graph.enabled={name}",
            f"train.output_dir={name}",
            "optim.lr=0.01",
            "train.train_iter=60",
        ]
        settings.append("train.log_period=1")
        result = worker.train_net("my_config.py", *settings, cwd=tmp_path)
        assert result.returncode == 0, result
    losses = [read_column(tmp_path / name) for name in ("false", "true")]
    assert losses[0][60] < 0.5 * losses[0][1]
    # what docs/guarantees.md promises
    assert_allclose(list(losses[1].values()), list(losses[0].values()), rtol=1e-5)


# ------------------------------------------------------------------------------ what all pages show


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_path_exists(page):
    assert missing_paths(page.read_text()) == []


@contextmanager
def skip_without_weights():
    """Skip the test if a config needs published weights (requirements/pretrained.txt) that are not
    installed.
    """
    try:
        yield
    except ConfigError as error:
        if "requirements/pretrained.txt" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_pages_hold_no_path_of_a_machine(page):
    assert re.findall(r"/(?:tmp|home|root|work|Users)/\w+", page.read_text()) == []


def test_the_readme_names_the_two_commands_and_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600, "five minutes"
    assert (
        "bash tools/train.sh tools/train_net.py configs/gpt_stdlib.py 1\nbash tools/test.sh\n"
        in text
    )
    index = (ROOT / "docs/README.md").read_text()
    unnamed = [page.name for page in ROOT.glob("docs/*.md") if page.name not in index]
    assert unnamed == []


def user_pages():
    """Return the pages for users, without the index, the generated reference, `docs/migrate` and
    `docs/dev`.
    """
    return sorted(
        page for page in ROOT.glob("docs/*.md") if page.name not in ("README.md", "config.md")
    )


def test_users_read_few_pages_and_words():
    texts = [page.read_text() for page in user_pages()]
    assert len(texts) <= 16
    assert sum(len(text.split()) for text in texts) <= 20_000


def test_the_chinese_readme_shows_the_same_commands_code_and_links():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    assert blocks(chinese, r"\w*") == blocks(english, r"\w*")
    link = r"\]\(((?!README)[^)]+)\)"
    assert re.findall(link, chinese) == re.findall(link, english)


def test_the_checks_can_fail():
    """Negative control of the checks above."""
    assert missing_paths("see `tools/train.sh` and `configs/nowhere.py`.") == ["configs/nowhere.py"]
    page = ROOT / "README.md"
    links = ["docs/README.md#words", "docs/nowhere.md", "docs/README.md#none", "../"]
    assert broken_links(page, " ".join(f"[a]({link})" for link in links)) == links[1:]
