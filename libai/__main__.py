"""`python -m libai`, and `python PATH/libai/__main__.py` from a clone that is not installed: the
command `libai`.
"""

import os
import sys

# the first entry is this file's folder or, after `python -m`, the working directory. A json.py in
# it would hide Python's module
if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from libai.cli.main import main

if __name__ == "__main__":
    main()
