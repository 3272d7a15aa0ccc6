"""Simulate two machines on one by network namespaces that a virtual cable (veth) joins.

Needs user namespaces and iproute2, but not root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

#: from the range for tests between networks (RFC 2544); each namespace sees only these and its own
#: loopback
ADDRESSES = ("198.18.0.1", "198.18.0.2")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[int, int]]:
    """Yield the ids of two processes that keep two namespaces with `ADDRESSES` alive.

    If namespaces cannot be created, skip the test with the reason, or fail in continuous
    integration.
    """
    holders = []
    try:
        try:
            # the second network must belong to the user namespace of the first one, or no cable can
            # join them
            holders.append(_hold(["unshare", "--user", "--map-root-user", "--net"]))
            holders.append(_hold([*on_machine(holders[0].pid), "unshare", "--net"]))
            first, second = machines = (holders[0].pid, holders[1].pid)
            _run(first, f"ip link add cable type veth peer name cable netns {second}")
            for machine, address in zip(machines, ADDRESSES):
                _run(machine, f"ip address add {address}/30 dev cable")
                _run(machine, "ip link set lo up")
                _run(machine, "ip link set cable up")
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip()
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"network namespaces cannot be made here: {reason}")
        yield machines
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=60)


def on_machine(machine: int, *command: str) -> list[str]:
    """Return the command that starts `command` on a machine."""
    return [
        "nsenter",
        "--target",
        str(machine),
        "--user",
        "--net",
        "--preserve-credentials",
        *command,
    ]


def _run(machine: int, command: str) -> None:
    subprocess.run(
        on_machine(machine, *command.split()),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _hold(command: list[str]) -> subprocess.Popen[str]:
    """Start a process in new namespaces, which exist until the process ends, at the latest when
    this process ends.
    """
    # each command replaces the previous one, so that the process id stays the same
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        _, errors = holder.communicate(timeout=60)
        raise subprocess.SubprocessError(errors)
    return holder
