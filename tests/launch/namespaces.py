"""Two machines on one: network namespaces joined by a cable (veth). Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

#: the range for tests between networks (RFC 2544); each namespace sees only these and its own loopback
ADDRESSES = ("198.18.0.1", "198.18.0.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with `ADDRESSES`. Skips the test, with the reason, where they cannot be made."""
    names = (f"libai-{os.getpid()}-0", f"libai-{os.getpid()}-1")
    made = []
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
                made.append(name)
            _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, ADDRESSES):
                _ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "cable", "up")
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip()
            pytest.skip(f"network namespaces cannot be made here: {reason}")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


def on_machine(name: str, *command: str) -> list[str]:
    """`command` as it is started on the machine `name`."""
    return ["ip", "netns", "exec", name, *command]
