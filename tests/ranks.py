"""How scripts that tests start on several ranks come to their end: `run_rank(main, *arguments)` as their last line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from libai.utils.distributed import barrier


def run_rank(main: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Call `main` and end the process, all ranks together.

    Always past the exit handlers: in OneFlow 0.9.0 a rank that merely raises waits for the others for ever, and after
    many graphs in one process the handlers themselves have been seen to hang.
    """
    try:
        main(*arguments)
        barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
