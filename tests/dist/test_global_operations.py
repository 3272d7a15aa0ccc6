"""Operations over global tensors on two ranks give the values and gradients of one process, in both
modes.
"""

import pytest
from mesh_launch import launch

pytestmark = pytest.mark.dist

#: float32 rounding; measured: at most 1e-6
BOUND = 1e-5


@pytest.mark.launch
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_operations_see_the_samples_of_all_ranks(mode, tmp_path):
    found = launch("operations_on_ranks.py", 2, tmp_path, str(tmp_path / "result.json"), mode)
    assert len(found["rows"]) == 18
    assert {name: apart for name, apart in found["rows"].items() if not apart <= BOUND} == {}
    # negative control: OneFlow's own stack has a wrong gradient
    assert all(apart > 1e-3 for apart in found["control"].values())
