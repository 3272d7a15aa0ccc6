"""Errors whose text is all that a user needs, and the exit codes that processes of libai end with."""

import re
from typing import Any

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
#: stopped from outside with everything saved, `--resume` continues (EX_TEMPFAIL of sysexits.h)
EXIT_RESUMABLE = 75


class UserError(ValueError):
    """The user asked for something that cannot be: a mistake in config, arguments, data or model contract.

    The tools print its text alone, without a traceback, and exit with code 2. The text says what was asked,
    what was found, why it cannot be and what to change.
    """

    #: the exit code of a process that ends by it
    exit_code = EXIT_USER_MISTAKE


class OutputLostError(OSError):
    """The output folder was removed or renamed during the run; to continue would lose its results (exit code 1)."""

    #: the tools print its text without a traceback, which would tell nothing more
    explains_itself = True


def describe_error(text: str, exit_code: int) -> dict[str, Any]:
    """Return an error as every command prints it with --json: the text, and what a program may look for in it.

    `key`: the setting or flag, `place`: the file and line, `fix`: the last sentence; each null if the text has none.
    """
    key = re.search(r"\b(train|graph|model|optim|dataloader|(lr|momentum)_scheduler)(\.\w+)+|--[a-z][a-z-]*", text)
    place = re.match(r"(\S+\.(py|ya?ml)(:\d+)?): ", text)
    before, _, last = text.rpartition(". ")
    return {
        "error": text,
        "key": key[0] if key else None,
        "place": place[1] if place else None,
        "fix": last if before else None,
        "exit_code": exit_code,
    }


def last_line(error: BaseException) -> str:
    """The last line of an error's text, where OneFlow has the reason; its class when it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without colours and C++ stack of OneFlow's; its class when it has none.

    >>> first_line(RuntimeError("\x1b[1mError\x1b[0m: no such tensor\n  File ..."))
    'no such tensor'
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    first = text.splitlines()[0].strip() if text else ""
    if unequal := re.fullmatch(r"\((\S+) vs (\S+)\)", first):  # a check whose text OneFlow leaves out
        return f"sizes that must be equal are {unequal[1]} and {unequal[2]}"
    return re.sub(r"^Error:\s*", "", first).rstrip(". ") or type(error).__name__
