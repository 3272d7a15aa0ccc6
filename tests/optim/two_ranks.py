"""Runs on two ranks, started by test_global_optim.py: clipping and optimizer state of global parameters.

Every check compares with one process (NumPy, or local tensors on each rank). Ends with exit code 1 on any failure.
"""

import math
import os
import sys
import traceback

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.native.kernels import are_kernels_on
from libai.oneflow_fixes.job.clip import make_clip_norm_exact
from libai.oneflow_fixes.job.job_edit import JobEdit
from libai.optim import clip_grad_norm, export_graph_state, export_state, import_state, to_graph_state

BROADCAST, SPLIT = flow.sbp.broadcast, flow.sbp.split
NUM_ITERS = 4
FEATURES = np.random.RandomState(0).randn(2, 32).astype("float32")


def parameter_with_gradient(gradient, placement, sbp):
    parameter = nn.Parameter(flow.zeros(*gradient.shape, placement=placement, sbp=sbp))
    parameter.grad = flow.tensor(gradient, placement=placement, sbp=BROADCAST).to_global(sbp=sbp)
    return parameter


def on_all_ranks(tensor):
    return tensor.to_global(placement=flow.placement.all("cpu"), sbp=BROADCAST).to_local().numpy()


def check_clipping(layouts):
    """One norm over parameters of several layouts, and every gradient scaled by it."""
    rng = np.random.RandomState(1)
    gradients = [rng.randn(4, 2).astype("float32") for _ in layouts]
    for norm_type in (1.0, 2.0, math.inf):
        expected = np.linalg.norm(np.concatenate([gradient.ravel() for gradient in gradients]), norm_type)
        parameters = [parameter_with_gradient(g, *layout) for g, layout in zip(gradients, layouts)]
        norm = clip_grad_norm(parameters, 0.5, norm_type)
        np.testing.assert_allclose(on_all_ranks(norm), expected, rtol=1e-6)
        for parameter, gradient in zip(parameters, gradients):
            np.testing.assert_allclose(on_all_ranks(parameter.grad), gradient * (0.5 / expected), rtol=1e-5)


def build_model(is_global):
    flow.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    if is_global:  # tensor parallel: first layer by columns, second by rows
        everywhere = flow.placement.all("cpu")
        for name, sbp in (("0.weight", SPLIT(0)), ("0.bias", SPLIT(0)), ("2.weight", SPLIT(1)), ("2.bias", BROADCAST)):
            layer, _, attribute = name.partition(".")
            parameter = getattr(model[int(layer)], attribute)
            parameter.data = parameter.data.to_global(placement=everywhere, sbp=BROADCAST).to_global(sbp=sbp)
    return model


def build_optimizer(model):
    groups = [{"params": list(model[0].parameters()), "lr": 0.002}, {"params": list(model[2].parameters())}]
    return flow.optim.AdamW(groups, lr=0.001, weight_decay=0.1, amsgrad=True)


def features(is_global):
    if not is_global:
        return flow.tensor(FEATURES)
    return flow.tensor(FEATURES, placement=flow.placement.all("cpu"), sbp=BROADCAST)


def train(model, optimizer, is_global):
    inputs, losses = features(is_global), []
    for _ in range(NUM_ITERS):
        loss = ((model(inputs) - 1.0) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.numpy().item())
    return losses


class TrainGraph(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, inputs):
        loss = ((self.model(inputs) - 1.0) ** 2).mean()
        loss.backward()
        return loss


def arrays_of(tensors):
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def check_state():
    """local -> global eager -> graph -> global eager, each with new objects, equals one local run."""
    model = build_model(is_global=False)
    optimizer = build_optimizer(model)
    expected = train(model, optimizer, False)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    saved = arrays_of(tensors), scalars
    weights = {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}
    for _ in range(3):
        expected += train(model, optimizer, False)

    model = build_model(is_global=True)
    for name, parameter in model.named_parameters():
        whole = flow.tensor(weights[name], placement=parameter.placement, sbp=BROADCAST)
        parameter.data = whole.to_global(sbp=parameter.sbp)
    optimizer = build_optimizer(model)
    assert import_state(optimizer, model.named_parameters(), *saved).is_exact
    losses = expected[:NUM_ITERS] + train(model, optimizer, True)
    for tensor in export_state(optimizer, model.named_parameters())[0].values():
        assert tensor.is_global

    tensors, scalars = export_state(optimizer, model.named_parameters())
    optimizer = build_optimizer(model)
    graph = TrainGraph(model, optimizer)
    state = to_graph_state(arrays_of(tensors), scalars, "model", optimizer, model.named_parameters())
    graph.load_state_dict(state)
    losses += [graph(features(True)).numpy().item() for _ in range(NUM_ITERS)]
    optimizer.zero_grad(set_to_none=True)

    tensors, scalars = export_graph_state(graph.state_dict(), "model", model.named_parameters(), optimizer)
    assert scalars == {"step": 3 * NUM_ITERS}, scalars
    fresh = build_optimizer(model)
    import_state(fresh, model.named_parameters(), tensors, scalars)  # tensor to tensor, without arrays
    for name, parameter in model.named_parameters():
        assert fresh._state[parameter]["exp_avg"].sbp == parameter.sbp, name
    losses += train(model, fresh, True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


class ClippingGraph(TrainGraph):
    def _Graph__rebuild_outputs(self, out2name=None):
        with JobEdit(self._full_job_proto) as job:
            assert make_clip_norm_exact(job) == (0 if are_kernels_on() else 4)
        super()._Graph__rebuild_outputs(out2name)


def check_clipping_in_a_graph():
    """A graph over split parameters, with the rewritten clip norm, equals eager clipping of local ones."""
    model = build_model(is_global=False)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(NUM_ITERS):
        loss = ((model(features(False)) - 1.0) ** 2).mean()
        loss.backward()
        assert clip_grad_norm(model.parameters(), 0.05).numpy() > 0.1  # the bound is in force
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.numpy().item())
    model = build_model(is_global=True)
    clipping = {"clip_grad_max_norm": 0.05, "clip_grad_norm_type": 2.0}
    graph = ClippingGraph(model, flow.optim.SGD([{"params": list(model.parameters()), **clipping}], lr=0.1))
    losses = [graph(features(True)).numpy().item() for _ in range(NUM_ITERS)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def main():
    assert flow.env.get_world_size() == 2
    everywhere = flow.placement.all("cpu")
    check_clipping([(everywhere, BROADCAST), (everywhere, SPLIT(0)), (everywhere, SPLIT(0)), (everywhere, SPLIT(1))])
    check_clipping([(flow.placement("cpu", [0]), BROADCAST), (flow.placement("cpu", [1]), BROADCAST)])
    check_state()
    check_clipping_in_a_graph()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # in OneFlow 0.9.0 a rank that merely raises waits for the others for ever
