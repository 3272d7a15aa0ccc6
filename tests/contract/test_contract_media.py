"""Pictures, histograms and texts of hooks reach the run folder and TensorBoard."""

import json
from types import SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run
from event_files import events_in
from PIL import Image
from refusals import refused

from libai.engine import HookBase
from libai.engine.events.storage import EventStorage

pytestmark = pytest.mark.e2e


def figure():
    """Return a stand-in for a matplotlib figure of 3 x 2 pixels."""

    def savefig(file, format):
        Image.fromarray(np.full((2, 3, 3), 200, np.uint8)).save(file, format)

    return SimpleNamespace(savefig=savefig)


class Shows(HookBase):
    def after_step(self):
        storage = self.trainer.storage
        if self.trainer.completed_iters in (3, 8):
            storage.put_image("val/weights", flow.ones(4, 5) * 0.5)
            storage.put_figure("plot", figure())
            storage.put_histogram("x", [0.0, 1.0, 1.0, float("nan")])
            storage.put_text("sample", "some *text*")


@pytest.mark.parametrize("in_thread", ["false", "true"])
def test_media_are_files_and_events(in_thread, mode, tmp_path):
    settings = ("train.writers=[jsonl,tensorboard]", "train.evaluation.enabled=false")
    run = make_run(tmp_path, mode, *settings, f"train.async_write_metrics={in_thread}")
    run.trainer.register_hooks([Shows()])
    run.train()
    folder = tmp_path / "media"
    assert len([*folder.rglob("iter_*")]) == 8
    image = np.asarray(Image.open(folder / "val_weights" / "iter_0000003.png"))
    assert image.shape == (4, 5, 3) and (image == 128).all()
    assert np.asarray(Image.open(folder / "plot" / "iter_0000008.png")).shape == (2, 3, 3)
    assert (folder / "sample" / "iter_0000003.txt").read_text() == "some *text*"
    assert sum(json.loads((folder / "x" / "iter_0000008.json").read_text())["counts"]) == 3
    values = [value for event in events_in(tmp_path / "tb") for value in event.summary.value]
    shown = {value.tag: value for value in values}
    assert shown["val/weights"].image.height == 4 and shown["plot"].image.width == 3
    assert shown["x"].histo.num == 3
    assert shown["sample/text_summary"].tensor.string_val == [b"some *text*"]


@pytest.mark.parametrize(
    "put, text",
    [
        (
            lambda storage: storage.put_image("a", np.zeros((2, 2, 5))),
            r"an image of shape \(2, 2, 5\)",
        ),
        (lambda storage: storage.put_image("a", np.full((2, 2), 1.5)), "values from 1.5 to 1.5"),
        (lambda storage: storage.put_image("a", np.full((2, 2), np.nan)), "values from nan to nan"),
        (lambda storage: storage.put_figure("a", [1]), "takes a matplotlib figure, not list"),
        (lambda storage: storage.put_histogram("a", [np.inf]), "none of 1 values is finite"),
    ],
)
def test_media_that_cannot_be_shown_are_refused(put, text):
    storage = EventStorage()
    storage.show_media_with(lambda media: None)
    with refused(text):
        put(storage)
