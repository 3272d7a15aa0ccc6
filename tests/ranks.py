"""End scripts that tests start on several ranks: call `run_rank(main, *arguments)` in their last
line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from libai.utils.distributed import barrier


def run_rank(main: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Call `main` and end the process, all ranks together.

    After a failure past the exit handlers: in OneFlow 0.9.0 a rank that merely raises waits for the
    others for ever. After success through them: a rank that is gone too early makes the others
    abort.
    """
    try:
        main(*arguments)
        barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)
