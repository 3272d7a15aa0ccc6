"""Run cells one after another on the ranks of one job, and write a line before and after each.

Started with the arguments ROWS.jsonl CELLS.json by `cells.run_cells`, which sets PYTHONPATH. The
line before a cell names it in case it ends or blocks the job.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ranks import run_rank

from libai.utils.distributed import gather_objects, get_rank


def error_of(target: str, name: str) -> str:
    """Return the error of a cell `module:function[key]` on this rank, or an empty string."""
    function, _, key = name.partition("[")
    module, _, function = function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(key.removesuffix("]"))
    except Exception:
        # another rank may now wait for this one forever
        print(traceback.format_exc(), flush=True)
        _write(target, {"cell": name, "failed": get_rank()})
        return traceback.format_exc()[-3000:]
    return ""


def main(target: str, listed: str) -> None:
    for name in json.loads(Path(listed).read_text()):
        print(f"--- {name}", flush=True)
        _write_once(target, {"cell": name})
        begun, worked = time.monotonic(), time.process_time()
        errors = gather_objects(error_of(target, name))
        gc.collect()  # a trainer holds itself in cycles, and its compiled graph much memory
        _write_once(target, {"cell": name, "errors": errors})
        begun, worked = time.monotonic() - begun, time.process_time() - worked
        print(f"{begun:.1f} s, {worked:.1f} s of the processor: {name}", flush=True)


def _write_once(target: str, row: dict[str, Any]) -> None:
    if get_rank() == 0:
        _write(target, row)


def _write(target: str, row: dict[str, Any]) -> None:
    with open(target, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
