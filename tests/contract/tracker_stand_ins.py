"""Trackers as their packages show them to `libai.engine.log.trackers`, with what was sent kept in memory."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def install(monkeypatch: Any, package: str) -> dict[str, dict[str, Any]]:
    """Put `package` in the place of the real one; returns run id → `rows` (a list), `config`, `summary`, `texts`."""
    sent: dict[str, dict[str, Any]] = {}
    for name, contents in {"wandb": _wandb, "mlflow": _mlflow, "aim": _aim}[package](sent).items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return sent


def _new(sent: dict[str, Any], tracker_id: str) -> dict[str, Any]:
    return sent.setdefault(tracker_id, {"rows": [], "config": {}, "summary": {}, "texts": {}, "opened": 0})


def _wandb(sent: dict[str, Any]) -> dict[str, dict[str, Any]]:
    class Html(str):
        pass

    class Run:
        def __init__(self, id: str, config: dict[str, Any], dir: str, resume: str, **_: Any):
            assert resume == "allow"
            self.id, self._found = id, _new(sent, id)
            self._found["config"].update(config)
            self._found["opened"] += 1
            self.summary = self._found["summary"]

        def log(self, data: dict[str, Any], step: int) -> None:
            for name, value in data.items():
                if isinstance(value, Html):
                    self._found["texts"][name] = value
                else:
                    self._found["rows"].append((name, step, value))

        def finish(self) -> None:
            self._found["finished"] = True

    return {"wandb": {"init": lambda **options: Run(**options), "Html": Html}}


def _mlflow(sent: dict[str, Any]) -> dict[str, dict[str, Any]]:
    class MlflowClient:
        def __init__(self, tracking_uri: str | None = None):
            pass

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return name

        def create_run(self, experiment: str, tags: Any, run_name: str) -> Any:
            tracker_id = f"m{len(sent)}"
            _new(sent, tracker_id)["opened"] = 1
            return SimpleNamespace(info=SimpleNamespace(run_id=tracker_id))

        def update_run(self, run_id: str, status: str) -> None:
            sent[run_id]["opened"] += 1

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            for key, value in params:
                assert sent[run_id]["config"].setdefault(key, value) == value, "a parameter cannot be changed"
            sent[run_id]["rows"] += [(key, step, value) for key, value, _, step in metrics]

        def log_text(self, run_id: str, text: str, file: str) -> None:
            sent[run_id]["texts"][file] = text

        def log_dict(self, run_id: str, value: Any, file: str) -> None:
            sent[run_id][file.removesuffix(".json")].update(value)

        def set_terminated(self, run_id: str, status: str) -> None:
            sent[run_id]["finished"] = status

    entities = {"Metric": lambda *fields: fields, "Param": lambda *fields: fields}
    return {"mlflow": {"MlflowClient": MlflowClient}, "mlflow.entities": entities}


def _aim(sent: dict[str, Any]) -> dict[str, dict[str, Any]]:
    class Text(str):
        pass

    class Run:
        def __init__(self, run_hash: str | None, repo: Any, experiment: str, **_: Any):
            self.hash = run_hash or f"a{len(sent)}"
            self._found = _new(sent, self.hash)
            self._found["opened"] += 1

        def __setitem__(self, name: str, value: Any) -> None:
            self._found[name].update(value)

        def track(self, value: Any, name: str, step: int) -> None:
            if isinstance(value, Text):
                self._found["texts"][name] = value
            else:
                self._found["rows"].append((name, step, value))

        def close(self) -> None:
            self._found["finished"] = True

    return {"aim": {"Run": Run, "Text": Text}}
