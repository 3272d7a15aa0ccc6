"""AdamW that decays weights but neither biases nor norms, the usual choice for transformers."""

from libai.config import LazyCall

optim = LazyCall("oneflow.optim.AdamW")(
    params=LazyCall("libai.optim.get_param_groups")(weight_decay="${..weight_decay}"),
    lr=1e-3,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
    do_bias_correction=True,
)
