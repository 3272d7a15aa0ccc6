"""The models of libai in PyTorch, for tools/benchmark.py: same weights, data and optimizer.

    TORCH_PYTHON tools/benchmark_torch.py CONFIG [overrides]     asks `python` on the PATH to export the case
    TORCH_PYTHON tools/benchmark_torch.py --case FOLDER          takes one that tools/export_case.py has written

Runs in an environment of its own with torch, numpy, safetensors and, for most models, transformers; imports neither
oneflow nor the package libai, but single files of it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "libai" / "benchmark" / "pytorch"))
# for protocol.py; the last, since a file there is named like Python's `statistics`
sys.path.append(str(Path(__file__).resolve().parents[1] / "libai" / "benchmark"))

from torch_training import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
