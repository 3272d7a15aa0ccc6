"""OneFlow 0.9.0's LAMB computes what docs/modes.md describes."""

import numpy as np
import oneflow as flow

RATE, DECAY, EPS, BETAS, STEPS = 0.02, 0.1, 1e-6, (0.9, 0.999), 10


def by_hand(start, gradients, decays_in_ratio):
    """You et al. 2020, algorithm 2, with the identity for phi; the paper has the decay in the trust
    ratio's norm.
    """
    w, m, v = start.astype(np.float64), 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        r = (m / (1 - BETAS[0] ** step)) / (np.sqrt(v / (1 - BETAS[1] ** step)) + EPS)
        update = r + DECAY * w
        w = w - RATE * np.linalg.norm(w) / np.linalg.norm(update if decays_in_ratio else r) * update
    return w


def test_the_trust_ratio_leaves_the_weight_decay_out():
    rng = np.random.default_rng(0)
    start = rng.standard_normal((8, 4)).astype(np.float32)
    gradients = [rng.standard_normal((8, 4)).astype(np.float32) for _ in range(STEPS)]
    w = flow.nn.Parameter(flow.tensor(start))
    optimizer = flow.optim.LAMB([w], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient in gradients:
        w.grad = flow.tensor(gradient)
        optimizer.step()
    found = w.detach().numpy()
    size = np.abs(found).max()
    assert np.abs(found - by_hand(start, gradients, decays_in_ratio=False)).max() / size < 1e-5
    assert 1e-4 < np.abs(found - by_hand(start, gradients, decays_in_ratio=True)).max() / size < 0.1
