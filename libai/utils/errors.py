"""Errors that users can understand from their message, and the exit codes of libai's processes."""

import re
from typing import Any

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
#: stopped from outside with everything saved; `--resume` continues (EX_TEMPFAIL of sysexits.h)
EXIT_RESUMABLE = 75


class UserError(ValueError):
    """Raised for a mistake by the user in the config, the arguments, the data or the model
    contract.

    The tools print the message without a traceback and exit with code 2. The message contains the
    request, the value found, the reason and a remedy.
    """

    #: exit code of a process that this error ends
    exit_code = EXIT_USER_MISTAKE


class GraphBuildError(UserError):
    """A model could not be compiled.

    The message names the user's line, the operation and the usual remedy.
    """

    #: true if the error only reports that another rank has failed
    is_consequence = False


class OutputLostError(OSError):
    """Raised if the output folder was removed or renamed during the run.

    Continuing would lose the results of the run. The exit code is 1.
    """

    #: the tools print the message without a traceback, which would not help
    explains_itself = True


def describe_error(text: str, exit_code: int) -> dict[str, Any]:
    """Return an error as every command prints it with --json: the message and parts that programs
    may need.

    `key` is the setting or flag, `place` is the file and line, and `fix` is the last sentence. Each
    is None if the message does not have it.
    """
    place = re.match(r"(\S+\.(py|ya?ml)(:\d+)?): ", text)
    before, _, last = text.rpartition(". ")
    key = re.search(
        r"\b(train|graph|model|optim|dataloader|(lr|momentum)_scheduler)(\.\w+)+|--[a-z][a-z-]*",
        before or text,
    )
    return {
        "error": text,
        "key": key[0] if key else None,
        "place": place[1] if place else None,
        "fix": last if before else None,
        "exit_code": exit_code,
    }


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without OneFlow's colours and C++ stack.

    Returns the name of its class if there is no message.

    >>> first_line(RuntimeError("\x1b[1mError\x1b[0m: no such tensor\n  File ..."))
    'no such tensor'
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    first = text.splitlines()[0].strip() if text else ""
    if unequal := re.fullmatch(
        r"\((\S+) vs (\S+)\)", first
    ):  # OneFlow gives no text for this check
        return f"sizes {unequal[1]} and {unequal[2]} do not match"
    return re.sub(r"^Error:\s*", "", first).rstrip(". ") or type(error).__name__
