"""Compile the kernels now: `python -m libai.native`.

This is for tools/env.sh and for container images that have no compiler at run time. If compilation is impossible, print
one line and exit with code 1.
"""

import sys

from libai.native.build import find_library
from libai.native.symbol_table import Unavailable

try:
    print(f"CPU kernels in {find_library()}")
except Unavailable as reason:
    sys.exit(f"libai's CPU kernels are off, and oneflow's are slower: {reason}")
