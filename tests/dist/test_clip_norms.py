"""Two ranks clip by the norm of one process, whatever its p and whoever holds which part of a parameter."""

from __future__ import annotations

import json

import clip_norm_ranks
import jobs
import numpy as np
import pytest

pytestmark = pytest.mark.dist


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_ranks_clip_as_one_process(tmp_path):
    jobs.run_ranks(clip_norm_ranks.__file__, 2, tmp_path / "found.json", cwd=tmp_path, timeout=280)
    rows = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) == 24
    expected = {str(norm): clip_norm_ranks.train("eager", norm) for norm in clip_norm_ranks.NORMS}
    for name, found in rows.items():
        np.testing.assert_allclose(found, expected[name.split(", ")[-1]], rtol=1e-5, atol=1e-6, err_msg=name)
    # negative control: another norm has other numbers
    assert not np.allclose(expected["inf"], expected["3.0"], rtol=1e-3, atol=1e-4)
