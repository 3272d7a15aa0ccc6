"""GPUs that oneflow 0.9.0 has no machine code for are named before a job starts."""

import pytest

from libai.utils import gpu


def test_gpus_without_machine_code_are_named():
    text = gpu.explain_unsupported_gpus("NVIDIA A100-SXM4-80GB, 8.0\nNVIDIA H100, 9.0\nGeForce GTX 980, 5.2\n")
    assert "GeForce GTX 980 (5.2), NVIDIA H100 (9.0)" in text and "A100" not in text


@pytest.mark.parametrize("listing", ["Tesla P100, 6.0\nL4, 8.9\n", "", "GPU, [N/A]\n"])
def test_supported_and_unknown_gpus_are_no_news(listing):
    assert gpu.explain_unsupported_gpus(listing) is None
