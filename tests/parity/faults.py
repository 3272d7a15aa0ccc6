"""The list of planted faults, each with its verdict in both modes."""

import faults_in_buffers  # noqa: F401
import faults_in_python  # noqa: F401
from faults_in_place import KEPT, LOST
from planting import (
    FAULTS,
    UPDATES,
    Fault,
    batches,
    build,
    distance,
    distance_of_states,
    plain_loop,
    state_of,
)

__all__ = [
    "FAULTS",
    "KEPT",
    "LOST",
    "UPDATES",
    "Fault",
    "batches",
    "build",
    "distance",
    "distance_of_states",
    "plain_loop",
    "state_of",
]
