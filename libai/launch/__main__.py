"""`python -m libai.launch FILE CONFIG PROCS …`: start a program of your own on several processes.

tools/train.sh calls this file by its path, which needs no installation. The work is in libai/cli/launch.py.
"""

import os
import sys

if not __package__:  # run by its path: the folder of libai takes the place of this file's own folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from libai.cli.launch import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
