"""The launcher and the process of a rank: preparing `import oneflow`, stopping, and exiting."""

import sys as _sys

# pip does not check a clone, and older Pythons cannot parse other files
if _sys.version_info < (3, 10):  # noqa: UP036
    raise ImportError(
        "libai needs CPython 3.10; `bash tools/env.sh` creates an environment with it"
    )
