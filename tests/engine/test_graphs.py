"""The compiled step equals an eager one, group by group, and describes what it was compiled for."""

import numpy as np
import oneflow as flow
from toy import are_equal, batches, make_trainer, weights_of


def groups_of_two_kinds(model):
    parts = [list(model.a.parameters()), list(model.b.parameters())]
    groups = [{"params": part, "amsgrad": is_max} for part, is_max in zip(parts, (False, True))]
    return flow.optim.AdamW(groups, lr=0.01)


def test_one_norm_over_several_kinds_of_updates_trains_eagerly_if_ranks_hold_parts(caplog):
    trained = []
    for mode in ("eager", "graph"):
        trainer = make_trainer(mode, optimizer=groups_of_two_kinds, max_grad_norm=0.1)
        trainer.layout.cuts_parameters = True
        trainer.train(0, 3)
        trained.append(weights_of(trainer))
    assert are_equal(*trained)
    assert (
        "kind of update (adam_conf amsgrad=False, adam_conf amsgrad=True): updates run eagerly"
        in caplog.text
    )


def test_earlier_gradients_do_not_freeze_parameters_in_the_graph():
    """A gradient that is not None at compile time keeps its parameter out of the update in OneFlow
    0.9.0.
    """
    trainer = make_trainer("graph")
    batch = {name: flow.from_numpy(value) for name, value in batches(1)[0].items()}
    trainer.model(**batch)["losses"]["cls"].backward()
    before = weights_of(trainer)
    trainer.train(0, 2)
    after = weights_of(trainer)
    assert all(not np.array_equal(value, after[name]) for name, value in before.items())
