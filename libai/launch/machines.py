"""Connect the launchers of a job on several machines, so that each knows within seconds what
happens on the others.

The launcher of machine 0 listens at the port after the job's; every other launcher keeps one
connection to it. They agree before any rank starts, send a beat every second, and pass on the first
failure. The lines are JSON and nothing in them is executed, but they are not authenticated: the
port is for trusted networks, like OneFlow's. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from libai import __version__
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE, UserError
from libai.utils.rank_notes import (
    DEFAULT_MEETING_SECONDS,
    DEFAULT_START_SECONDS,
    START_LIMIT,
    read_limit,
)
from libai.utils.screen import say

#: distance of this port from the job's port
PORT_OFFSET = 1
BEAT_SECONDS = 1.0
#: seconds without a beat after which a machine counts as gone
SILENT_SECONDS = 15.0
#: seconds in which the machines must report how they ended after a failure
SETTLE_SECONDS = 8.0
#: seconds after which a wait is said, and until it is said again
_SAY_SECONDS, _SAY_AGAIN_SECONDS = 10.0, 20.0
#: longest time in seconds that one look counts: a suspended launcher may look late
_LONGEST_LOOK = 1.0
_POLL_SECONDS = 0.05
#: longest accepted line, in bytes
_MOST_BYTES = 1 << 20

#: entries of the first message of a launcher, with their types
_HELLO: dict[str, type] = {"machine": int, "host": str, "facts": dict, "written": int}

Message = dict[str, Any]


@dataclass
class Report:
    """A failure on one machine.

    Attributes:
        said: the error as printed, with the rank.
        time: when it happened, in seconds since 1970.
        code: exit code of the rank.
        follows: whether it may follow from a failure elsewhere: 2 for an error that says so or a
            rank that lost another, 1 for one that waited, 0 otherwise.
        machine: number of the machine.
        output: last native output of the rank, if it raised no Python error.
        failure: kind and iteration of an error that a restart would repeat, or None.
    """

    said: str
    time: float
    code: int = EXIT_FAILED
    follows: int = 0
    machine: int = 0
    output: str = ""
    failure: list[Any] | None = None


@dataclass
class Ending:
    """The end of an attempt, on one machine or on all machines.

    Attributes:
        code: exit code.
        was_stopped: whether a signal to a launcher stopped it.
        written: iteration of the newest checkpoint that this job has written, or 0.
        report: the first failure, or None.
    """

    code: int
    was_stopped: bool = False
    written: int = 0
    report: Report | None = None

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Ending:
        """Return the ending that the dict `message` describes, as `asdict` makes it."""
        ending = cls(**message)
        ending.report = None if message["report"] is None else Report(**message["report"])
        return ending


@dataclass
class _Peer:
    """A connection to the launcher of another machine.

    `behind`: seconds by which its clock is behind ours, at most. `is_gone`: the connection has
    ended. `is_lost`: it has ended, or is silent, before the machine said how its ranks ended.
    """

    connection: socket.socket
    machine: int
    host: str
    iteration: int = 0
    silent_seconds: float = 0.0
    heard_at: float = field(default_factory=time.time)
    behind: float | None = None
    is_paused: bool = False
    is_gone: bool = False
    is_lost: bool = False
    ending: Ending | None = None
    rest: bytes = b""

    def __post_init__(self) -> None:
        # Python waits in `read` if there is a time limit
        self.connection.setblocking(True)

    def send(self, **message: Any) -> None:
        """Send a message if the connection is still open."""
        with contextlib.suppress(OSError):  # reading will notice that it is gone
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Iterator[Message]:
        """Yield the messages that have arrived. Sets `is_gone` at the end of the connection."""
        while True:
            try:
                chunk = self.connection.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk or len(self.rest) > _MOST_BYTES:
                self.is_gone = True
                break
            self.rest += chunk
            self.silent_seconds, self.heard_at = 0.0, time.time()
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):  # not one of our launchers
                self.is_gone = True
                return
            yield message


class Machines:
    """The launchers of a job, seen from one of them. By default there is only one.

    Args:
        node_rank: number of this machine.
        num_nodes: number of machines.
        address, port: of the job; the launcher of machine 0 listens at the next port.
        facts: what all launchers must have in common, by name.
    """

    def __init__(
        self,
        node_rank: int = 0,
        num_nodes: int = 1,
        address: str = "",
        port: int = 0,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.node_rank = node_rank
        self.are_several = num_nodes > 1
        self._num_nodes = num_nodes
        self._place = (address, port + PORT_OFFSET)
        # as JSON, like the facts that arrive
        self._facts: Message = json.loads(json.dumps({**facts, "libai": __version__}))
        self._peers: dict[int, _Peer] = {}
        self._listener: socket.socket | None = None
        self._has_met = False
        self._looked_at = time.monotonic()
        self._beat_at = 0.0
        self._iteration = 0
        #: whether a machine has failed or is gone
        self._is_in_trouble = False

    # ------------------------------------------------------------------ meeting

    def meet(self, state: Mapping[str, Any]) -> Message:
        """Wait for all machines, and return the `state` of machine 0 with the newest `written` of
        all.

        Raises `UserError` on every machine if their facts differ, or if a machine does not come in
        time.
        """
        seconds = DEFAULT_START_SECONDS if self._has_met else DEFAULT_MEETING_SECONDS
        limit = read_limit(START_LIMIT, seconds) or float("inf")
        self._is_in_trouble = False
        if self.node_rank:
            agreed = self._join(state, limit)
        else:
            agreed = self._gather(dict(state), limit)
        self._has_met = True
        self._looked_at = time.monotonic()
        return agreed

    def _gather(self, state: Message, limit: float) -> Message:
        waiting = _Waiting(limit)
        while len(self._peers) < self._num_nodes - 1:
            missing = sorted(set(range(1, self._num_nodes)) - self._peers.keys())
            names = " and ".join(f"machine {number}" for number in missing)
            if not waiting.goes_on(f"{names} to connect to port {self._place[1]}"):
                self._refuse(
                    f"{names} did not connect to machine 0 ({self._place[0]}:{self._place[1]}) "
                    f"within {limit:g} s. Are all launchers running, with the same ADDR and PORT, "
                    f"and no firewall in between? {START_LIMIT}=<seconds> waits longer."
                )
            for peer in list(self._peers.values()):
                list(peer.read())
                if peer.is_gone:  # it will come again
                    self._peers.pop(peer.machine).connection.close()
                peer.send(beat=0.0)
            self._accept(state)
        for peer in self._peers.values():
            peer.send(go=state)
        return state

    def _accept(self, state: Message) -> None:
        self._listener = self._listener or _listen(self._place[1])
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        peer = _Peer(connection, -1, "")
        hello = None
        greeting = _Waiting(BEAT_SECONDS)
        while hello is None and not peer.is_gone and greeting.goes_on():
            hello = next(peer.read(), None)
            time.sleep(_POLL_SECONDS / 10)
        if hello is None or {name: type(hello.get(name)) for name in _HELLO} != _HELLO:
            connection.close()  # something else that has found the port
            return
        peer.machine, peer.host = hello["machine"], hello["host"]
        self._require_same(peer, hello["facts"])
        state["written"] = max(state["written"], hello["written"])
        self._peers[peer.machine] = peer

    def _require_same(self, peer: _Peer, facts: Message) -> None:
        machine = f"machine {peer.machine} ({peer.host})"
        known = self._peers.get(peer.machine)
        self._peers[-1] = peer  # it is told, too
        if known is not None or not 0 < peer.machine < self._num_nodes:
            other = f", as {known.host} is" if known is not None else ""
            self._refuse(
                f"{peer.host} is machine {peer.machine}{other}. Give each machine its own "
                f"NODE_RANK, from 0 to {self._num_nodes - 1}."
            )
        differing = [name for name in self._facts if facts.get(name) != self._facts[name]]
        if differing:
            texts = [f"{name} is {facts.get(name)} on {machine}" for name in differing]
            ours = [f"{self._facts[name]} on machine 0 ({platform.node()})" for name in differing]
            text = "; ".join(f"{one} and {other}" for one, other in zip(texts, ours))
            self._refuse(f"the machines differ: {text}. Start the same command on all machines.")
        del self._peers[-1]

    def _refuse(self, text: str) -> None:
        for peer in self._peers.values():
            peer.send(refused=text)
        self.close()
        raise UserError(text)

    def _join(self, state: Mapping[str, Any], limit: float) -> Message:
        waiting = _Waiting(limit)
        place = f"{self._place[0]}:{self._place[1]}"
        reason: object = "no answer"
        while waiting.goes_on(f"machine 0 at {place}"):
            try:
                connection = socket.create_connection(self._place, timeout=BEAT_SECONDS)
            except OSError as error:
                reason = error
                time.sleep(_POLL_SECONDS)
                continue
            peer = _Peer(connection, 0, self._place[0])
            peer.send(
                machine=self.node_rank,
                host=platform.node(),
                facts=self._facts,
                written=state["written"],
            )
            while not peer.is_gone and waiting.goes_on("the other machines"):
                for message in peer.read():
                    if "refused" in message:
                        connection.close()
                        raise UserError(message["refused"])
                    if "go" in message:
                        self._peers = {0: peer}
                        return dict(message["go"])
                time.sleep(_POLL_SECONDS)
                peer.silent_seconds += _POLL_SECONDS
                peer.is_gone |= peer.silent_seconds > SILENT_SECONDS
            connection.close()
        raise UserError(
            f"machine {self.node_rank} could not reach machine 0 at {place} within {limit:g} s "
            f"({reason}). Is its launcher running, with the same ADDR and PORT, and no firewall in "
            f"between? {START_LIMIT}=<seconds> waits longer."
        )

    # ------------------------------------------------------------------ while ranks run

    def look(self, iteration: int | None = None) -> bool:
        """Send a beat if it is due, read what has arrived, and return whether a machine has failed
        or is gone.

        Takes a few microseconds. `iteration`: completed iterations of this machine, if it has
        changed.
        """
        now = time.monotonic()
        elapsed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
        self._iteration = self._iteration if iteration is None else iteration
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._tell(beat=time.time(), iteration=self._iteration)
        for peer in self._peers.values():
            if peer.is_gone:
                continue
            peer.silent_seconds += 0.0 if peer.is_paused else elapsed
            for message in peer.read():
                self._take(peer, message)
            is_silent = peer.is_gone or peer.silent_seconds > SILENT_SECONDS
            if is_silent and peer.ending is None:
                self._lose(peer)
        return self._is_in_trouble

    def pause(self, is_paused: bool) -> None:
        """Tell the other machines that this one is suspended, or continues."""
        self._tell(paused=is_paused)

    def tell_failure(self) -> None:
        """Tell the other machines that this job fails, so that they end their ranks too."""
        if not self._is_in_trouble:
            self._is_in_trouble = True
            self._tell(failed=True)

    def _tell(self, **message: Any) -> None:
        for peer in self._peers.values():
            if not peer.is_gone:
                peer.send(**message)

    def _take(self, peer: _Peer, message: Message) -> None:
        if "beat" in message:
            behind = time.time() - message["beat"]
            peer.behind = behind if peer.behind is None else min(peer.behind, behind)
            peer.iteration = message.get("iteration", peer.iteration)
        elif "paused" in message:
            peer.is_paused = message["paused"]
        elif "failed" in message:
            self.tell_failure()  # machine 0 passes it on
        elif "ended" in message:
            peer.ending = Ending.of(message["ended"])
            if peer.ending.report is not None and not self.node_rank:
                peer.ending.report.time += peer.behind or 0.0  # machine 0 compares times
            if peer.ending.code not in (0, EXIT_RESUMABLE):
                self.tell_failure()

    def _lose(self, peer: _Peer) -> None:
        """Report that a machine is gone."""
        seconds = peer.silent_seconds
        done = f"after iteration {peer.iteration}" if peer.iteration else "before an iteration"
        how = (
            "its launcher has ended and gave no reason"
            if peer.is_gone
            else f"nothing was heard from it for {seconds:.0f} s; is it running, and is the "
            "network up?"
        )
        peer.is_gone = peer.is_lost = True
        since = time.strftime("%H:%M:%S", time.localtime(peer.heard_at))
        said = f"error: machine {peer.machine} ({peer.host}) is gone since {since}, {done}: {how}"
        report = Report(said, peer.heard_at, machine=peer.machine)
        peer.ending = Ending(EXIT_FAILED, report=report)
        self.tell_failure()

    # ------------------------------------------------------------------ the end

    def settle(self, own: Ending) -> Ending:
        """Return how the attempt ended on all machines. Every machine gets the same answer.

        Waits until the ranks of all machines have ended.
        """
        if not self.are_several:
            return own
        if own.code not in (0, EXIT_RESUMABLE):
            self.tell_failure()
        peers = list(self._peers.values())
        if self.node_rank:
            self._tell(ended=asdict(own))
        self._wait_for_endings()
        if self.node_rank and not peers[0].is_lost:
            agreed = peers[0].ending or own
        else:
            agreed = _first_of([own, *(peer.ending or Ending(EXIT_FAILED) for peer in peers)])
        if not self.node_rank:
            self._tell(ended=asdict(agreed))
        self.close(keeps_listening=True)
        return agreed

    def _wait_for_endings(self) -> None:
        """Wait until every other machine has said how its ranks ended, after a failure for at most
        `SETTLE_SECONDS`.
        """
        waiting = _Waiting(float("inf"))
        while waiting.goes_on("the ranks of the other machines to end"):
            if self.look() and waiting.limit == float("inf"):
                waiting = _Waiting(SETTLE_SECONDS)
            if all(peer.ending is not None for peer in self._peers.values()):
                break
            time.sleep(_POLL_SECONDS)

    def close(self, keeps_listening: bool = False) -> None:
        """End all connections. The other machines then take this one for gone."""
        for peer in self._peers.values():
            peer.connection.close()
        self._peers = {}
        if self._listener is not None and not keeps_listening:
            self._listener.close()
            self._listener = None


def _first_of(endings: list[Ending]) -> Ending:
    """Return how a job ended whose machines have these endings."""
    reports = [one.report for one in endings if one.report is not None]
    report = min(reports, key=lambda one: (one.follows, one.time), default=None)
    codes = [one.code for one in endings]
    code = max(codes)
    if report is not None:
        code = EXIT_USER_MISTAKE if report.code == EXIT_USER_MISTAKE else EXIT_FAILED
    return Ending(
        code,
        any(one.was_stopped for one in endings),
        max(one.written for one in endings),
        report,
    )


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError as error:
        raise UserError(
            f"port {port} is in use on this machine ({error.strerror}). The launchers connect "
            "there: it is the one after PORT. Choose another PORT on every machine."
        ) from None
    listener.listen()
    listener.settimeout(_POLL_SECONDS)
    return listener


class _Waiting:
    """A wait of at most `limit` seconds, which is said on the screen if it takes long."""

    def __init__(self, limit: float):
        self.limit = limit
        self._waited = 0.0
        self._looked_at = time.monotonic()
        self._say_at = _SAY_SECONDS

    def goes_on(self, what: str = "") -> bool:
        """Return whether there is time left, and say now and then what is waited for."""
        now = time.monotonic()
        self._waited += min(now - self._looked_at, _LONGEST_LOOK)
        self._looked_at = now
        if what and self._waited >= self._say_at:
            self._say_at += _SAY_AGAIN_SECONDS
            say(f"launch: waiting for {what}, since {self._waited:.0f} s")
        return self._waited < self.limit
