"""A user mistake gives exit code 2 and one clear error on stderr, without a traceback or a second
line.
"""

import jobs
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("argument", "texts"),
    [
        (
            "train.trian_iter=5",
            ["train.trian_iter: no such setting", "Did you mean train.train_iter?"],
        ),
        ("--resume", ["--resume found no usable checkpoint", "Remove --resume"]),
    ],
)
def test_a_mistake_is_one_clear_error(folder, argument, texts):
    """One job each; tests/inputs tests hundreds of mistakes within one process."""
    result = jobs.train_net("user_config.py", argument, cwd=folder)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stdout + result.stderr, result
    assert len(result.errors) == 1, result
    assert result.errors[0].startswith("error: ") and "error: rank" not in result.errors[0], result
    for text in texts:
        assert text in result.errors[0], result


def test_a_mistake_in_a_dataset_shows_its_line_and_none_of_libai(folder):
    code = """
class Broken:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return nowhere
"""
    (folder / "broken.py").write_text(code)
    result = jobs.train_net(
        "user_config.py", "dataloader.train.dataset={_target_: broken.Broken}", cwd=folder
    )
    assert result.returncode == 1 and 'broken.py", line 6, in __getitem__' in result.stderr, result
    assert (
        "reading sample" in result.errors[-1]
        and "name 'nowhere' is not defined" in result.errors[-1]
    )
    assert "/libai/" not in result.stderr and "(--traceback shows all frames)" in result.errors[0]
