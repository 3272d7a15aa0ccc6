"""A program for two ranks: loaders without a config, custom training steps, and refusals."""

import json
import re
import sys
from pathlib import Path

import jobs
import numpy as np
import oneflow as flow
import test_own_step as own_step
import toy
from oneflow import nn

from libai.data import build_eval_loader, build_train_loader
from libai.engine import EagerTrainer, GraphTrainer, HookBase, StopTraining
from libai.parallel import Mesh, full_tensor
from libai.utils.distributed import barrier
from libai.utils.errors import UserError

TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
rank = flow.env.get_rank()
found = {}


def weights(trainer):
    return np.concatenate(
        [full_tensor(one).numpy().reshape(-1) for one in trainer.model.parameters()]
    )


def refusal(action):
    try:
        action()
    except UserError as error:
        return str(error)
    return "not refused"


def trained(cls, loader, iterations=6, **settings):
    flow.manual_seed(0)
    model = toy.Classifier()
    trainer = cls(model, loader, toy.optimizer_of("sgd", model), **settings)
    trainer.train(0, iterations)
    return trainer


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


# a loader without a config gives every rank its own part
data = joined(toy.batches(12))
samples = next(iter(build_train_loader(data, micro_batch_size=8)))["x"]
evaluated = sum(len(batch["x"]) for batch, _ in build_eval_loader(data, micro_batch_size=8))
by_mode = {
    mode: weights(trained(cls, build_train_loader(data, micro_batch_size=8)))
    for mode, cls in TRAINERS.items()
}
np.testing.assert_allclose(by_mode["graph"], by_mode["eager"], rtol=1e-5, atol=1e-6)
found["weights"] = by_mode["eager"].tolist()
found["samples"] = [float(samples.sum())]
found["evaluated"] = evaluated

# two ranks with the same samples
for mode, cls in TRAINERS.items():
    found[f"equal batches, {mode}"] = refusal(lambda cls=cls: trained(cls, toy.batches(6)))

# two ranks with different samples that compute one update together
tensor_parallel = {"mesh": Mesh(1, 2, 1), "plan": {"split": {"a.*": 0, "b.weight": 1}}}
for mode, cls in TRAINERS.items():
    found[f"different batches, {mode}"] = refusal(
        lambda cls=cls: trained(
            cls, build_train_loader(data, micro_batch_size=8), **tensor_parallel
        )
    )
    evaluate = trained(cls, toy.batches(6), **tensor_parallel).evaluate
    found[f"different batches, {mode} evaluation"] = refusal(
        lambda evaluate=evaluate: evaluate(build_eval_loader(data, micro_batch_size=8), {})
    )


class Told(list):
    is_replicated = True


trained(EagerTrainer, Told(toy.batches(6)))

# a custom update
own_batches = toy.batches(6, seed=rank)


class Forgets(own_step.Own):
    def reduce_gradients(self):
        pass


np.testing.assert_allclose(
    weights(trained(own_step.Own, own_batches)),
    weights(trained(EagerTrainer, own_batches)),
    rtol=1e-6,
)
found["forgotten"] = refusal(lambda: trained(Forgets, own_batches))


# a forward that differs by rank
class Odd(toy.Classifier):
    """Does something of `kind` only on rank 1."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.extra = kind, nn.Linear(8, 1)

    def forward(self, x, y):
        outputs = super().forward(x, y)
        if rank == 1 and self.kind == "raises":
            raise ValueError("not here")
        if rank == 1 and self.kind == "reaches more":
            outputs["losses"]["cls"] = outputs["losses"]["cls"] + self.extra(x).mean()
        if rank == 1 and self.kind == "returns more":
            outputs["losses"]["more"] = self.b.weight.square().mean()
        return outputs


def odd(cls, kind, **settings):
    flow.manual_seed(0)
    model = Odd(kind)
    trainer = cls(model, own_batches, flow.optim.SGD(model.parameters(), lr=0.1), **settings)
    trainer.train(0, 3)
    trainer.fetch_metrics()
    return trainer


for kind in ("raises", "reaches more", "returns more"):
    found[f"{kind}, graph"] = refusal(lambda kind=kind: odd(GraphTrainer, kind))
    found[f"{kind}, global"] = refusal(
        lambda kind=kind: odd(EagerTrainer, kind, gradient_reduction="global")
    )
found["returns more, eager"] = refusal(lambda: odd(EagerTrainer, "returns more", rehearse=0))
found["reaches more, eager"] = weights(odd(EagerTrainer, "reaches more", rehearse=0)).tolist()


# parameters whose gradients nobody would average
class Later(HookBase):
    def __init__(self, change):
        self._change = change

    def before_step(self):
        if self.trainer.iter == 2:
            self._change(self.trainer)


def swap(trainer):
    trainer.model.b = nn.Linear(16, 4)
    trainer.optimizer.param_groups[0]._parameters[1] = trainer.model.b.weight


def later(change, cls=EagerTrainer, **settings):
    model = toy.Classifier()
    model.a.requires_grad_(False)
    trainer = cls(model, own_batches, toy.optimizer_of("sgd", model), **settings)
    trainer.register_hooks([Later(change)])
    trainer.train(0, 4)


def on_one_rank(change):
    return lambda trainer: change(trainer) if rank == 0 else None


def double_weights(trainer):
    trainer.model.b.weight.data.mul_(2.0)


def add_decay(trainer):
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


for mode, cls in TRAINERS.items():
    found[f"double_weights, {mode}"] = refusal(
        lambda cls=cls: later(on_one_rank(double_weights), cls)
    )
found["add_decay, eager"] = refusal(lambda: later(on_one_rank(add_decay)))

found["swapped"] = refusal(lambda: later(swap))
found["thawed, ddp"] = refusal(
    lambda: later(lambda one: one.model.requires_grad_(True), gradient_reduction="ddp")
)
found["frozen, ddp"] = refusal(
    lambda: later(lambda one: one.model.b.bias.requires_grad_(False), gradient_reduction="ddp")
)
later(lambda one: one.model.requires_grad_(True))


# a custom graph
own_graph = weights(trained(GraphTrainer, own_batches, train_graph=own_step.OwnGraph))
np.testing.assert_allclose(
    own_graph, weights(trained(EagerTrainer, own_batches)), rtol=1e-4, atol=1e-6
)


# a switch away from OneFlow's DDP, whose hooks stay in the parameters
def switched(reduction):
    flow.manual_seed(0)
    model = toy.Classifier()
    model.a.weight.register_hook(lambda gradient: gradient * 3.0)
    trainer = EagerTrainer(
        model, own_batches, toy.optimizer_of("sgd", model), gradient_reduction=reduction
    )
    trainer.train(0, 3)
    trainer.switch_to("graph", gradient_reduction="auto")
    trainer.train(3, 6)
    return weights(trainer)


np.testing.assert_allclose(switched("ddp"), switched("flat"), rtol=1e-6)

# the recipe with two losses
random = np.random.RandomState(rank)
pairs = [
    {name: random.randn(4, 2).astype("float32") for name in ("real", "noise")} for _ in range(12)
]
ends = []
for mode in TRAINERS:
    gan = own_step.gan(mode, pairs)
    gan.train(0, 12)
    ends.append(weights(gan))
    first, second = own_step.gan(mode, pairs), own_step.gan(mode, pairs)
    first.train(0, 5)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    second.train(5, 12)
    np.testing.assert_array_equal(weights(second), ends[-1])
np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-6)

# the trainer put together from hooks in the page on the library: interrupted, and continued by a
# new one
pages = re.findall(
    r"^```python\n(.*?)^```", (jobs.ROOT / "docs/model_and_data.md").read_text(), re.M | re.S
)
page = {}
exec(pages[0].partition("eager, graph =")[0], page)
exec(pages[1].partition("setup_logging(None)")[0], page)
folder = Path(sys.argv[1])
for mode, cls in TRAINERS.items():
    whole, _ = page["build_trainer"](cls, folder / f"whole {mode}")
    whole.train(0, 40)
    cut, _ = page["build_trainer"](cls, folder / f"cut {mode}")
    cut.train(0, 20)
    resumed, checkpointer = page["build_trainer"](cls, folder / f"cut {mode}", seed=1)
    resumed.train(checkpointer.resume(), 40)
    barrier()  # rank 0 has written
    rows = [jobs.read_curve(folder / f"{name} {mode}") for name in ("whole", "cut")]
    exact = np.array_equal(weights(whole), weights(resumed)) and rows[0] == rows[1]
    found[f"resumed exactly, {mode}"] = [exact, [row["iter"] for row in rows[1]]]


# a hook on the main rank stops all of them
class StopsOnMain(HookBase):
    only_on = "main"

    def after_step(self):
        if self.trainer.iter == 2:
            raise StopTraining("enough")


for mode, cls in TRAINERS.items():
    flow.manual_seed(0)
    model = toy.Classifier()
    trainer = cls(model, lambda: toy.batches(1000, seed=rank), toy.optimizer_of("sgd", model))
    trainer.register_hooks([StopsOnMain()])
    trainer.train(0, 1_000_000)
    found[f"stopped, {mode}"] = [trainer.status, trainer.completed_iters]

# a plan that graph mode needs and cannot follow: the trainer stays eager and trains on
switched = trained(EagerTrainer, own_batches, 3, plan={"split": {"no.such.weight": 0}})
found["switched"] = refusal(lambda: switched.switch_to("graph"))
switched.train(3, 6)
np.testing.assert_array_equal(weights(switched), weights(trained(EagerTrainer, own_batches)))

Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
