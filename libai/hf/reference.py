"""Compute the reference outputs of `transformers`: python reference.py FOLDER INPUTS.npz
OUTPUTS.npz.

The script runs in an environment with PyTorch and transformers. It imports nothing from libai.
"""

import sys


def compute(folder: str, inputs: dict) -> dict:
    """Return the outputs of `transformers` for `inputs`, both as NumPy arrays, computed in float32.

    The outputs are logits, or the last hidden state of a bare model.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = (
        getattr(transformers, config.architectures[0])
        .from_pretrained(folder, dtype=torch.float32)
        .eval()
    )
    with torch.no_grad():
        outputs = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    names = (
        "logits",
        "prediction_logits",
        "seq_relationship_logits",
        "last_hidden_state",
        "pooler_output",
    )
    return {name: outputs[name].numpy() for name in names if name in outputs}


if __name__ == "__main__":
    import numpy as np

    folder, source, target = sys.argv[1:]
    np.savez(target, **compute(folder, dict(np.load(source))))
