"""Start a program of your own on several processes: `python -m libai.launch FILE CONFIG PROCS …`.

tools/train.sh calls this file by its path, which works without installation. libai/cli/launch.py
does the work.
"""

import os
import signal
import sys

# Python puts this file's folder or, with -m, the working directory first on sys.path. Files there,
# such as a json.py, would hide modules of the standard library.
if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # Ctrl-C during the imports would print a traceback

from libai.cli.launch import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
