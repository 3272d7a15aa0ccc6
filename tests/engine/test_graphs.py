"""The compiled step equals an eager one, group by group, and describes what it was compiled for."""

import numpy as np
import oneflow as flow
import toy


def make_trainer(mode, loader, groups=None, accumulation=1, optimizer=flow.optim.AdamW, **options):
    flow.manual_seed(0)
    model = toy.Classifier()
    built = optimizer(groups(model) if groups else model.parameters(), lr=0.01)
    return toy.trainer_of(
        mode, model, loader, built, num_accumulation_steps=accumulation, **options
    )


def two_groups(model, **second):
    matrices = [p for n, p in model.named_parameters() if "bias" not in n]
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": biases, "weight_decay": 0.0, **second},
    ]


def weights(trainer):
    return {name: p.numpy().copy() for name, p in trainer.model.named_parameters()}


def test_one_norm_over_several_kinds_of_updates_trains_eagerly_if_ranks_hold_parts(caplog):
    def groups(model):
        return two_groups(model, amsgrad=True)

    trained = []
    for mode in ("eager", "graph"):
        trainer = make_trainer(mode, toy.batches(3), groups, max_grad_norm=0.1)
        trainer.layout.cuts_parameters = True
        trainer.train(0, 3)
        trained.append(weights(trainer))
    assert all(np.array_equal(value, trained[1][name]) for name, value in trained[0].items())
    assert (
        "kind of update (adam_conf amsgrad=False, adam_conf amsgrad=True): updates run eagerly"
        in caplog.text
    )


def test_earlier_gradients_do_not_freeze_parameters_in_the_graph():
    """A gradient that is not None at compile time keeps its parameter out of the update in OneFlow
    0.9.0.
    """
    trainer = make_trainer("graph", toy.batches(4))
    batch = {name: flow.from_numpy(value) for name, value in toy.batches(1)[0].items()}
    trainer.model(**batch)["losses"]["cls"].backward()
    before = weights(trainer)
    trainer.train(0, 2)
    assert all(not np.array_equal(value, weights(trainer)[name]) for name, value in before.items())
