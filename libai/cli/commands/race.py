"""`libai benchmark generate`: tokens per second of libai and of transformers, interleaved in one run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from libai.cli.parser import Parser
from libai.launch.installation import ROOT
from libai.utils.errors import UserError

_SCRIPT = Path(__file__).parents[2] / "inference/race_worker.py"


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="libai benchmark generate", description=__doc__)
    parser.add_argument("folder", help="a Hugging Face folder of a model that generates text")
    parser.add_argument("--torch-python", required=True, help="of an environment with PyTorch and transformers")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="prompts at a time (default 1 8)")
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1], help="0: each library's own (default 0 1)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default 16)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens (default 32)")
    parser.add_argument("--rounds", type=int, default=5, help="of each library, in turn (default 5)")
    args = parser.parse_args(arguments)
    if min(*args.rows, args.prompt, args.rounds) < 1 or args.tokens < 2:
        raise UserError("--rows, --prompt and --rounds must be at least 1, and --tokens at least 2.")
    print("rows  threads  libai tok/s  transformers tok/s  libai/transformers (processor time)  same tokens")
    for threads in args.threads:
        own = _Worker(sys.executable, args.folder, "libai", threads)
        with own as ours, _Worker(args.torch_python, args.folder, "transformers", threads) as theirs:
            for rows in args.rows:
                case = [rows, args.prompt, args.tokens]
                for worker in (ours, theirs):
                    worker.ask(case)  # the first time is slower
                pairs = [(ours.ask(case), theirs.ask(case)) for _ in range(args.rounds)]
                speed = [rows * (args.tokens - 1) / statistics.median(pair[i][0] for pair in pairs) for i in (0, 1)]
                wall, work = (statistics.median(b[i] / a[i] for a, b in pairs) for i in (0, 1))
                same = all(a[2] == b[2] for a, b in pairs)
                row = f"{rows:4}  {threads or 'own':>7}  {speed[0]:11.1f}  {speed[1]:18.1f}  {wall:18.2f} ({work:.2f})"
                print(f"{row:74}  {'yes' if same else 'no'}", flush=True)
    return 0


class _Worker:
    """A process that generates with one library."""

    def __init__(self, python: str, folder: str, kind: str, threads: int):
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} if threads else {}
        environment = {**os.environ, "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD": "0", **count}
        if kind == "libai":
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        command = [python, str(_SCRIPT), folder, kind]
        self._name = f"{kind} with {python}"
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        except OSError as error:
            raise UserError(f"--torch-python {python}: {error.strerror}.") from None
        self._answer()

    def ask(self, case: list[int]) -> list:
        """Seconds, processor seconds and tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{self._name} ended with exit code {self._process.wait()}; what it wrote stands above.")
        return line
