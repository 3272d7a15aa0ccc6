"""Where libai lies, and its commands in a clone and a Python without OneFlow: continue in the project's environment.

`libai/__init__.py` imports this before anything else, so it is kept to what any Python 3 can read.
"""

import importlib.util
import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
#: the clone, or the folder into which the package is installed
ROOT = os.path.dirname(PACKAGE)
#: the words that start the command `libai` in a process of its own, also from a clone that is not installed
LIBAI = (sys.executable, os.path.join(PACKAGE, "__main__.py"))
#: the words that start a program on several processes: FILE CONFIG PROCS follow
LAUNCH = (sys.executable, os.path.join(PACKAGE, "launch", "__main__.py"))
#: the packages that the commands import
NEEDED = ("oneflow", "omegaconf", "numpy")


def shipped_configs():
    """The folder of the configs that come with libai."""
    inside = os.path.join(PACKAGE, "configs")  # an installed wheel
    return inside if os.path.isdir(inside) else os.path.join(ROOT, "configs")


def shipped_config(name):
    """The path of a shipped config by its name alone, None where there is no such config."""
    path = os.path.join(shipped_configs(), name + ".py")
    return path if name.isidentifier() and os.path.isfile(path) else None


def is_clone():
    """Whether libai is used from its repository, and not installed from a wheel."""
    return os.path.isfile(os.path.join(ROOT, "tools", "train.sh"))


def _own_command(argv, orig_argv):
    """What starts this process: a command's name for messages and the words behind the interpreter, or nothing."""
    path = os.path.realpath(argv[0] if argv else "")
    folder, name = os.path.split(path)
    if folder == os.path.join(ROOT, "tools"):
        return "tools/" + name, list(argv)
    for file in (LIBAI[1], LAUNCH[1]):
        if path == os.path.realpath(file):
            return os.path.relpath(path, ROOT), list(argv)
    if argv[:1] == ["-m"]:  # while `-m` looks for the module
        for module in ("libai", "libai.launch"):
            if module in orig_argv:
                return "-m " + module, ["-m", module] + list(argv[1:])
    return "", []


def find_environment() -> None:
    """Return when this process is no command of a clone, or has what the command needs; else never.

    Continues as the interpreter of .venv (or `$VENV`) where `tools/env.sh` has made it; ends with 2 and one line where
    it has not. `NO_VENV=1` keeps to the present interpreter.
    """
    name, words = _own_command(sys.argv, getattr(sys, "orig_argv", []))
    if not name or not is_clone():
        return
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if not missing:
        return
    venv = os.path.join(os.getcwd(), os.environ.get("VENV", os.path.join(ROOT, ".venv")))
    python = os.path.join(venv, "bin", "python")
    is_there = os.path.exists(os.path.join(venv, ".ready")) and os.access(python, os.X_OK)
    if is_there and os.environ.get("NO_VENV") != "1" and os.path.realpath(venv) != os.path.realpath(sys.prefix):
        os.execv(python, [python] + words)
    text = (
        "error: {0} needs {1}, which {2} (Python {3}.{4}) does not have. Run it as `$(bash tools/env.sh) "
        "{0} ...`: env.sh prints the interpreter to use, and makes .venv the first time.\n"
    )
    version = sys.version_info
    sys.stderr.write(text.format(name, ", ".join(missing), sys.executable, version[0], version[1]))
    sys.exit(2)
