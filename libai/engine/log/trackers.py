"""The numbers of a run for experiment trackers: Weights & Biases, MLflow, Aim. Each is an optional package.

They are imported when training begins, on rank 0 only. What a tracker raises ends the run, as with any other writer.
"""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from libai.engine.log.writers import LogRecord, RunInfo, Writer
from libai.utils.atomic import read_json
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")


class TrackerWriter(Writer):
    """A writer to a tracker, which keeps every row that it was sent.

    `<package>.json` in the output folder notes which run of the tracker this is and the last iteration sent. A resumed
    run continues that run, without the iterations that it makes again.

    Args:
        run_info: the run; a note of another one does not count.
    """

    package: str

    def __init__(self, run_info: RunInfo):
        if importlib.util.find_spec(self.package) is None:
            raise UserError(
                f"train.writers asks for {self.package}, which is not installed. Run `pip install {self.package}`, or "
                "leave it out of train.writers."
            )
        self._info = run_info
        self._note = run_info.output_dir / f"{self.package}.json"
        self._start = self._sent = 0
        self._id = ""
        self._run: Any = None

    def _open(self, tracker_id: str) -> tuple[str, Any]:
        """`(id, run)` of the tracker's run `tracker_id`, or of a new one where it is empty."""
        raise NotImplementedError

    def _log(self, record: LogRecord) -> None:
        raise NotImplementedError

    def _log_text(self, name: str, text: str, iter: int) -> None:
        raise NotImplementedError

    def _log_summary(self, summary: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def begin(self, start_iter: int = 0) -> None:
        self.close()
        note = read_json(self._note)
        if note.get("run_id") != self._info.run_id:
            note = {}
        self._start, self._sent = start_iter, note.get("last_iter", 0)
        self._id, self._run = self._open(note.get("id", ""))
        if self._sent > start_iter:
            logger.info("%s has this run up to iteration %d: not sent again", self.package, self._sent)

    def write(self, record: LogRecord) -> None:
        if self._run is None:
            self.begin()
        if self._start < record.iter <= self._sent:
            return
        self._log(record)
        note = {"run_id": self._info.run_id, "id": self._id, "last_iter": record.iter}
        self._note.write_text(json.dumps(note) + "\n")

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        if self._run is None:
            self.begin()
        if iter > self._sent or not self._sent:
            self._log_text(name, text, iter)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._log_summary(summary)

    def close(self) -> None:
        if self._run is not None:
            try:
                self._end()
            finally:
                self._run = None


class WandbWriter(TrackerWriter):
    """A run of Weights & Biases with the id of this run. `WANDB_MODE=offline` needs no network.

    Args:
        run_info: see `TrackerWriter`.
        project: that the run belongs to.
        options: further arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.
    """

    package = "wandb"

    def __init__(self, run_info: RunInfo, project: str = "libai", options: Mapping[str, Any] | None = None):
        super().__init__(run_info)
        self._options = {"project": project, **(options or {})}

    def _open(self, tracker_id: str) -> tuple[str, Any]:
        import wandb

        given = {
            "id": tracker_id or self._info.run_id,
            "name": self._info.name,
            "dir": str(self._info.output_dir),
            "config": dict(self._info.config),
            "allow_val_change": True,
            "resume": "allow",
            "settings": {"console": "off"},  # lines and progress bar go through the terminal that is there
        }
        run = wandb.init(**{**given, **self._options})
        return run.id, run

    def _log(self, record: LogRecord) -> None:
        self._run.log(dict(record.scalars), step=record.iter)

    def _log_text(self, name: str, text: str, iter: int) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=iter)

    def _log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))

    def _end(self) -> None:
        self._run.finish()


class MLflowWriter(TrackerWriter):
    """A run of MLflow: settings are its parameters, texts and the summary its artifacts.

    Args:
        run_info: see `TrackerWriter`.
        experiment: that the run belongs to; made where there is none of the name.
        tracking_uri: where MLflow keeps runs; default: MLflow's own (`MLFLOW_TRACKING_URI`).
    """

    package = "mlflow"
    _STATUS = {"failed": "FAILED", "interrupted": "KILLED"}
    _status = "FINISHED"

    def __init__(self, run_info: RunInfo, experiment: str = "libai", tracking_uri: str | None = None):
        super().__init__(run_info)
        self._experiment, self._tracking_uri = experiment, tracking_uri

    def _open(self, tracker_id: str) -> tuple[str, Any]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self._tracking_uri)
        if tracker_id:
            client.update_run(tracker_id, status="RUNNING")
            return tracker_id, client
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        tags = {"libai.run_id": self._info.run_id}
        tracker_id = client.create_run(experiment, tags=tags, run_name=self._info.name).info.run_id
        params = [Param(name, str(value)[:6000]) for name, value in self._info.config.items()]
        for first in range(0, len(params), 100):  # no request may hold more, and no value be longer
            client.log_batch(tracker_id, params=params[first : first + 100])
        return tracker_id, client

    def _log(self, record: LogRecord) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # other signs are refused
        names = {tag: re.sub(r"[^\w\-. :/]", "_", tag) for tag in record.scalars}
        metrics = [Metric(names[tag], float(value), now, record.iter) for tag, value in record.scalars.items()]
        self._run.log_batch(self._id, metrics=metrics)

    def _log_text(self, name: str, text: str, iter: int) -> None:
        self._run.log_text(self._id, text, f"{name}.txt" if iter == 0 else f"{name}-{iter}.txt")

    def _log_summary(self, summary: Mapping[str, Any]) -> None:
        self._status = self._STATUS.get(str(summary.get("status")), "FINISHED")
        self._run.log_dict(self._id, dict(summary), "summary.json")

    def _end(self) -> None:
        self._run.set_terminated(self._id, self._status)


class AimWriter(TrackerWriter):
    """A run of Aim, with the settings under `config` and the summary under `summary`.

    Args:
        run_info: see `TrackerWriter`.
        experiment: that the run belongs to.
        repo: path or address of Aim's repository; default: the one of the working directory.
    """

    package = "aim"

    def __init__(self, run_info: RunInfo, experiment: str = "libai", repo: str | None = None):
        super().__init__(run_info)
        self._experiment, self._repo = experiment, repo

    def _open(self, tracker_id: str) -> tuple[str, Any]:
        import aim

        off = {"system_tracking_interval": None, "capture_terminal_logs": False}
        run = aim.Run(tracker_id or None, repo=self._repo, experiment=self._experiment, **off)
        run.name, run["config"] = self._info.name, dict(self._info.config)
        return run.hash, run

    def _log(self, record: LogRecord) -> None:
        for tag, value in record.scalars.items():
            self._run.track(float(value), name=tag, step=record.iter)

    def _log_text(self, name: str, text: str, iter: int) -> None:
        import aim

        self._run.track(aim.Text(text), name=name, step=iter)

    def _log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run["summary"] = dict(summary)

    def _end(self) -> None:
        self._run.close()
