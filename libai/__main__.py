"""`python -m libai`, and `python PATH/libai/__main__.py` from a clone that is not installed: the command `libai`."""

import os
import sys

if __name__ == "__main__":  # replaces this file's folder or, after `python -m`, the working directory with its json.py
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from libai.cli.main import main

if __name__ == "__main__":
    main()
