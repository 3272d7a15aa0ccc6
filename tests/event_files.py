"""Read TensorBoard's event files, with tensorboardX's protocol buffers."""

from pathlib import Path
from typing import Any


def events_in(folder: Path) -> list[Any]:
    """Return all events of the files in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            length = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return events
