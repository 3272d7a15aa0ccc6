"""Writer of a run's numbers to Weights & Biases, or to another package with its interface, as trackio.

The package is imported when training begins, on rank 0 only. An error of the tracker ends the run, as with any other
writer.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import logging
from collections.abc import Mapping
from typing import Any

from libai.engine.events.writers import LogRecord, RunInfo, Writer
from libai.utils.atomic import read_json
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")


class WandbWriter(Writer):
    """A run of a tracker that has `init`, `Html`, `run.log` and `run.finish` of Weights & Biases.

    A tracker keeps every row that it was sent. `<package>.json` in the output folder notes the last iteration sent: a
    resumed run continues the tracker's run, without the iterations that it makes again.

    Args:
        run_info: the run; a note of another run does not count.
        package: `wandb` or `trackio`.
        project: name of the tracker's project.
        options: further arguments of `init`, such as `entity`, `group`, `tags` or `mode` of W&B.
    """

    def __init__(
        self,
        run_info: RunInfo,
        package: str = "wandb",
        project: str = "libai",
        options: Mapping[str, Any] | None = None,
    ):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"train.writers asks for {package}, which is not installed. Run `pip install {package}`, or leave it "
                "out of train.writers."
            )
        self._info = run_info
        self._package = package
        self._options = {"project": project, **(options or {})}
        self._note = run_info.output_dir / f"{package}.json"
        self._start = 0
        self._sent = 0
        self._run: Any = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`. Opens the tracker's run, or opens it again."""
        self.close()
        note = read_json(self._note)
        is_ours = note.get("run_id") == self._info.run_id
        self._start = start_iter
        self._sent = note.get("last_iter", 0) if is_ours else 0
        self._run = importlib.import_module(self._package).init(**{**self._identity(), **self._options})
        if self._sent > start_iter:
            logger.info("%s has this run up to iteration %d: not sent again", self._package, self._sent)

    def _identity(self) -> dict[str, Any]:
        """The arguments of `init` by which the tracker finds the run again."""
        common = {"config": dict(self._info.config), "resume": "allow"}
        if self._package != "wandb":  # trackio has no ids: it finds a run by its name
            return {**common, "name": f"{self._info.name} {self._info.run_id}"}
        return {
            **common,
            "name": self._info.name,
            "id": self._info.run_id,
            "dir": str(self._info.output_dir),
            "allow_val_change": True,
            "settings": {"console": "off"},  # lines and progress bar go through the terminal that is there
        }

    def write(self, record: LogRecord) -> None:
        if self._run is None:
            self.begin()
        if self._start < record.iter <= self._sent:
            return
        self._run.log(dict(record.scalars), step=record.iter)
        note = {"run_id": self._info.run_id, "last_iter": record.iter}
        self._note.write_text(json.dumps(note) + "\n")

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        if self._run is None:
            self.begin()
        if iter > self._sent or not self._sent:
            page = importlib.import_module(self._package).Html(f"<pre>{html.escape(text)}</pre>")
            self._run.log({name: page}, step=iter)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if hasattr(self._run, "summary"):  # not in trackio
            self._run.summary.update(dict(summary))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
