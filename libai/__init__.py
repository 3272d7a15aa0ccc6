"""libai: an eager/graph dual-mode trainer for OneFlow.

Importing the package prepares the process environment for OneFlow (see `libai.launch.runtime`) and
nothing else: oneflow itself is imported by the first module that needs it.
"""

from libai.launch.runtime import prepare_environment as _prepare_environment

__version__ = "0.1.0"

_prepare_environment()
