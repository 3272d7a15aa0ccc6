"""A user mistake gives exit code 2 and one clear error on stderr, without a traceback or a second
line.
"""

import jobs
import pytest

pytestmark = pytest.mark.e2e


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
