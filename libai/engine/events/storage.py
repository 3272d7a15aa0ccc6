"""Storage for the scalars of an iteration, including those still on the device, until a writer
reads them.

Putting a scalar never waits for the device. Reading waits once for all pending scalars. Nothing
here writes files: see `libai.engine.events.writers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.events.media import Media, figure_array, histogram_values, image_array
from libai.utils.errors import UserError
from libai.utils.tensors import detached, fetch_scalars, full_tensor

_LAZY = (
    "{0} was put from inside a compiled graph, where tensors have no values. Return it from "
    'forward instead: {{"losses": {{...}}, "metrics": {{{1}: value}}}}.'
)
_current: ContextVar[EventStorage | None] = ContextVar("libai_event_storage", default=None)


def get_event_storage() -> EventStorage:
    """Return the `EventStorage` of the innermost `with` block in this thread.

    Models, data and hooks without a trainer record scalars with
    `get_event_storage().put_scalar("aux", value)`. Raises `RuntimeError` outside of such a block.
    """
    storage = _current.get()
    if storage is None:
        raise RuntimeError(
            "get_event_storage() was called outside of training: no EventStorage is open in this "
            "thread. trainer.train() opens one; elsewhere write `with EventStorage() as storage:` "
            "around the call."
        )
    return storage


class EventStorage:
    """Stores the newest value of every scalar with its iteration.

    Inside its `with` block, `get_event_storage()` returns this object. Blocks may be nested.

    Attributes:
        iter: 0-based iteration of the values that are put now; the trainer sets it.
    """

    def __init__(self, start_iter: int = 0):
        self.iter = start_iter
        self._latest: dict[str, tuple[Any, int]] = {}
        self._tokens: list[Token[EventStorage | None]] = []
        #: receives pictures, histograms and texts; None: nobody shows them
        self._show: Callable[[Media], None] | None = None

    def __enter__(self) -> EventStorage:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())

    # ------------------------------------------------------------------ putting

    def put_scalar(self, name: str, value: Any, cur_iter: int | None = None) -> None:
        """Record `value`, a number or a tensor with one element, under `name`.

        `cur_iter`: 0-based iteration of the value; default: the current one. A tensor is detached
        and fetched only when the scalar is read, so do not change it in place later.
        """
        if isinstance(value, flow.Tensor):
            _check_tensor(name, value)
            value = detached(
                value
            )  # a stored loss must not keep the activations of its graph alive
        elif isinstance(value, (int, float, np.number, np.bool_)):
            value = float(value)
        else:
            raise TypeError(
                f"put_scalar({name!r}, ...) takes a number or a one-element tensor, not "
                f"{type(value).__name__}: {value!r}."
            )
        self._latest.pop(
            name, None
        )  # keep the order of the calls, also after a resume: checkpoints sort names
        self._latest[name] = (value, self.iter if cur_iter is None else cur_iter)

    # a type checker also compares `cur_iter` with the values of `**metrics`
    def put_scalars(self, *, cur_iter: Any = None, **scalars: Any) -> None:
        """Call `put_scalar` for each keyword argument.

        Pass tags as `put_scalars(**{"eval/val/loss": 2.3})`.
        """
        for name, value in scalars.items():
            self.put_scalar(name, value, cur_iter)

    def put_image(self, name: str, image: Any) -> None:
        """Write a picture to `media/` in the output folder and to TensorBoard.

        `image`: tensor or array (height, width), (height, width, channels) or (channels, height,
        width); integers from 0 to 255, or floats from 0 to 1. Only rank 0 writes it.
        """
        self._put_media("image", name, image, image_array)

    def put_figure(self, name: str, figure: Any) -> None:
        """Write a matplotlib figure, as `put_image` does."""
        self._put_media("image", name, figure, figure_array)

    def put_histogram(self, name: str, values: Any) -> None:
        """Write the distribution of the finite values of a tensor or array to TensorBoard, and its
        counts to `media/`. Only rank 0 writes it.
        """
        self._put_media("histogram", name, values, histogram_values)

    def put_text(self, name: str, text: str) -> None:
        """Write a text, such as a generated sample, to `media/` and to TensorBoard (as Markdown).

        Only rank 0 writes it.
        """
        self._put_media("text", name, text, lambda _, text: str(text))

    def _put_media(
        self, kind: str, name: str, value: Any, convert: Callable[[str, Any], Any]
    ) -> None:
        """Pass a checked value to the writers. Collective for a global tensor."""
        if isinstance(value, flow.Tensor):
            if value.is_lazy:
                raise UserError(_LAZY.format(f"the {kind} {name!r}", repr(name)))
            if value.is_global:  # before the ranks without writers leave
                value = full_tensor(detached(value))
        if self._show is not None:
            self._show(Media(kind, name, self.iter + 1, convert(name, value)))

    def show_media_with(self, show: Callable[[Media], None] | None) -> None:
        """Pass pictures, histograms and texts to `show` from now on; None: to nobody."""
        self._show = show

    # ------------------------------------------------------------------ reading

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the newest value and the iteration of every scalar.

        Waits once for the device if tensors are pending.

        Collective if one of them is a global tensor. To read one scalar, use `get`, which fetches
        only that scalar.
        """
        self._fetch([name for name, (value, _) in self._latest.items() if type(value) is not float])
        return dict(self._latest)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the scalars put so far that begin with `prefix`.

        Does not wait for the device.
        """
        return [name for name in self._latest if name.startswith(prefix)]

    def get(self, name: str) -> tuple[float, int] | None:
        """Return the newest value of `name` and its iteration, or None.

        Waits only if this scalar is on the device.
        """
        found = self._latest.get(name)
        if found is not None and type(found[0]) is not float:
            self._fetch([name])
            found = self._latest[name]
        return found

    def _fetch(self, names: Sequence[str]) -> None:
        values = fetch_scalars([self._latest[name][0] for name in names]) if names else []
        for name, value in zip(names, values):
            self._latest[name] = (value.item(), self._latest[name][1])

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-serializable state: iteration and newest finite values.

        Waits for the device as `latest` does.
        """
        latest = {
            name: list(found) for name, found in self.latest().items() if math.isfinite(found[0])
        }
        return {"iter": self.iter, "latest": latest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.iter = int(state["iter"])
        self._latest = {
            name: (float(value), int(at)) for name, (value, at) in state["latest"].items()
        }


def _check_tensor(name: str, tensor: flow.Tensor) -> None:
    shape = tuple(tensor.shape)
    if math.prod(shape) != 1:
        raise ValueError(
            f"the scalar {name!r} is a tensor of shape {shape}. Put one element, such as its "
            "mean()."
        )
    if tensor.is_lazy:
        raise UserError(_LAZY.format(f"the scalar {name!r}", repr(name)))
