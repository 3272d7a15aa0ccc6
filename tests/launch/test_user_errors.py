"""A user mistake gives exit code 2 and one clear error on stderr, without a traceback or a second line."""

from __future__ import annotations

import jobs
import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.user_folder(tmp_path_factory)


#: one job each; tests/inputs tests hundreds of mistakes within one process
MISTAKES = {
    "misspelt key": (["train.trian_iter=5"], ["train.trian_iter: no such setting", "Did you mean train.train_iter?"]),
    "resume in an empty folder": (["--resume"], ["--resume found no usable checkpoint", "Remove --resume"]),
}


@pytest.mark.parametrize("arguments, texts", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_error(folder, arguments, texts):
    result = jobs.train_net("user_config.py", *arguments, cwd=folder)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stdout + result.stderr, result
    assert len(result.errors) == 1, result
    assert result.errors[0].startswith("error: ") and "error: rank" not in result.errors[0], result
    for text in texts:
        assert text in result.errors[0], result
