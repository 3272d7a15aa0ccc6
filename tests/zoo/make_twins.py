"""Write `twins.json`: the loss curves of the zoo's models in PyTorch, from the models' own source.

    python tests/zoo/make_twins.py            (an environment with torch and numpy; made with PyTorch 2.13.0 on CPU)

The modules are read as text and `oneflow` becomes `torch`: one source, two frameworks, the same
initial weights (by parameter name) and batches. Models that PyTorch does not run as they are
written are left out and named.
"""  # noqa: E501

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import zoo_data  # noqa: E402

SOURCES = ("models_sequence", "models_vision", "models_tables", "models_special")
#: as in the tests: steps of SGD with momentum and of AdamW
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01),
}


def models_of(source: str) -> dict[str, Any]:
    """The table `MODELS` of a module of the zoo, run on PyTorch."""
    text = (HERE / f"{source}.py").read_text(encoding="utf-8")
    text = text.replace("import oneflow.nn.functional as F", "import torch.nn.functional as F")
    text = re.sub(r"^import oneflow as flow$", "import torch as flow", text, flags=re.MULTILINE)
    text = text.replace("from oneflow import nn", "from torch import nn")
    module = types.ModuleType(source)
    exec(compile(text, f"{source}.py", "exec"), module.__dict__)
    return module.MODELS


def train(build: Any, kind: str, optimizer: str) -> list[float]:
    """The loss of every iteration on full batches."""
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(zoo_data.initial_value(name, tuple(parameter.shape))))
    stepper = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in zoo_data.batches(kind):
        outputs = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        loss = sum(outputs["losses"].values())
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    curves = {}
    for source in SOURCES:
        for name, (build, kind) in models_of(source).items():
            try:
                curves[name] = {
                    optimizer: train(build, kind, optimizer) for optimizer in OPTIMIZERS
                }
            except Exception as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
    made = {"made_with": f"PyTorch {torch.__version__.split('+')[0]}, one thread", "losses": curves}
    (HERE / "twins.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{len(curves)} models", file=sys.stderr)


if __name__ == "__main__":
    main()
