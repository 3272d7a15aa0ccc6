"""`python -m libai.native`: compile the kernels now.

For tools/env.sh, and for images that have no compiler when they run. Exit code 1 and one line where that cannot be.
"""

import sys

from libai.native.build import find_library
from libai.native.symbol_table import Unavailable

try:
    print(f"CPU kernels in {find_library()}")
except Unavailable as reason:
    sys.exit(f"no CPU kernels of libai, oneflow's own are slower: {reason}")
