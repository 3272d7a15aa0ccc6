"""The commands of `tools/` in a Python without OneFlow: go on in the project's environment, or say how to.

`libai/__init__.py` calls this before anything else, so it is kept to what any Python 3 can read.
"""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
#: what each command imports; others than these need all of the first
NEEDED = ("oneflow", "omegaconf", "numpy")
NEEDED_BY = {"checkpoint.py": ("numpy",), "launch.py": (), "benchmark_torch.py": ()}


def find_environment() -> None:
    """Return when this process is no command of `tools/`, or has what the command needs; else never.

    Continues as the interpreter of .venv (or `$VENV`) where `tools/env.sh` has made it; ends with 2 and one line where
    it has not. `NO_VENV=1` keeps to the present interpreter.
    """
    folder, name = os.path.split(os.path.realpath(sys.argv[0] if sys.argv else ""))
    if folder != os.path.join(ROOT, "tools"):
        return
    missing = [module for module in NEEDED_BY.get(name, NEEDED) if importlib.util.find_spec(module) is None]
    if not missing:
        return
    venv = os.path.join(os.getcwd(), os.environ.get("VENV", os.path.join(ROOT, ".venv")))
    python = os.path.join(venv, "bin", "python")
    is_there = os.path.exists(os.path.join(venv, ".ready")) and os.access(python, os.X_OK)
    if is_there and os.environ.get("NO_VENV") != "1" and os.path.realpath(venv) != os.path.realpath(sys.prefix):
        os.execv(python, [python] + sys.argv)
    text = (
        "error: tools/{0} needs {1}, which {2} (Python {3}.{4}) does not have. Run it as `$(bash tools/env.sh) "
        "tools/{0} ...`: env.sh prints the interpreter to use, and makes .venv the first time.\n"
    )
    version = sys.version_info
    sys.stderr.write(text.format(name, ", ".join(missing), sys.executable, version[0], version[1]))
    sys.exit(2)
