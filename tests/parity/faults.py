"""The list of planted faults, each with its verdict in both modes."""

import faults_in_buffers  # noqa: F401
import faults_in_python  # noqa: F401
from faults_in_place import KEPT, LOST
from planting import FAULTS, Fault, case_of, outcome

__all__ = ["FAULTS", "KEPT", "LOST", "Fault", "case_of", "outcome"]
