"""`python -m libai`, and `python PATH/libai/__main__.py` from a clone that is not installed: the command `libai`."""

import os
import sys

if not __package__:  # run by its path: the folder of the package takes the place of the package's own folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from libai.cli.main import main

if __name__ == "__main__":
    main()
