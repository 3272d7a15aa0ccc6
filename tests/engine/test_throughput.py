import numpy as np
import pytest

from libai.engine.events.throughput import Throughput, memory_gb


def test_rates_describe_the_latest_update():
    throughput = Throughput()
    throughput.update(100.0, samples=1)
    throughput.update(4.0, samples=20, items=400, flops=2e12, data_seconds=0.5, iters=2)
    assert throughput.rates() == {
        "step_ms": 2000.0,
        "data_ms": 250.0,
        "samples_per_s": 5.0,
        "tokens_per_s": 100.0,
        "tflops": 0.5,
    }


def test_the_summary_covers_the_run_and_weights_iterations_equally():
    throughput = Throughput()
    for milliseconds in range(1, 11):
        throughput.update(milliseconds / 1e3, samples=1)
    throughput.update(0.04, samples=10, iters=10)
    each = [*range(1, 11)] + [4] * 10
    expected = {
        "step_ms": np.mean(each),
        "step_ms_median": np.median(each),
        "step_ms_p90": np.percentile(each, 90),
        "samples_per_s_p90": np.percentile(1e3 / np.array(each), 90),
        "iters": 20,
        "samples": 20,
        "seconds": 0.095,
    }
    summary = throughput.summary()
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


def test_device_memory_is_read_only_on_cuda(monkeypatch):
    import oneflow as flow

    monkeypatch.setattr(flow._oneflow_internal, "GetCUDAMemoryUsed", lambda: 512.0, raising=False)
    assert memory_gb("cuda")["device_mem_gb"] == 0.5
    assert "device_mem_gb" not in memory_gb("cpu")
