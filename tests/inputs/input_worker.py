"""Runs command lines of tools/train_net.py one after the other in one process, for tests of many
bad inputs.

Reads a JSON list of arguments a line from stdin; answers with a JSON line: exit code, stdout,
stderr. A process of its own, since what is tried here may end it.
"""

import contextlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import libai
from libai.launch.guard import run_guarded

TOOL = str(Path(libai.__file__).parents[1] / "tools" / "train_net.py")


@contextlib.contextmanager
def captured(descriptors, files):
    """Whatever is written to the file descriptors, also by C++, goes to the files."""
    kept = [os.dup(descriptor) for descriptor in descriptors]
    sys.stdout.flush()
    try:
        for descriptor, file in zip(descriptors, files):
            os.dup2(file.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in zip(descriptors, kept):
            os.dup2(before, descriptor)
            os.close(before)


def run(arguments):
    """Return the exit code and output that a separate process would have for one command line."""
    sys.argv = [TOOL, *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with captured((1, 2), (out, err)):
            code = run_guarded(lambda: runpy.run_path(TOOL)["main"]())
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": code, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)
