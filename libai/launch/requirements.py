"""Check the packages that libai needs, and explain an import of oneflow that fails.

Uses only the standard library.
"""

import importlib.metadata
import os
import platform
import sys

from libai.utils.errors import UserError
from libai.utils.installation import environment_advice

# import names of the packages in requirements/core.in that every command needs
NEEDED = (
    "oneflow",
    "numpy",
    "omegaconf",
    "hydra",
    "tensorboardX",
    "rich",
    "safetensors",
    "filelock",
    "tokenizers",
)

# package, its module, the first major version that does not work, arguments of `pip install`
_TOO_NEW = (
    ("numpy", "numpy", 2, "'numpy<2'"),
    ("protobuf", "google.protobuf", 4, "'protobuf<4' 'tensorboard<2.21'"),
)


class OneFlowImportError(ImportError, UserError):
    """Raised if oneflow cannot be imported in this environment.

    The message explains what to install.
    """

    name = "oneflow"


def explain_import_error(error: BaseException) -> str | None:
    """Return one line that explains how to fix a failed `import oneflow` or a lack of memory, or
    None.
    """
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
        found = (
            f"{error.name} is not installed for {sys.executable}, Python "
            f"{platform.python_version()}"
        )
        if sys.version_info[:2] > (3, 10):
            found += ", and oneflow 0.9.0 has no wheel for it"
        return f"{found}. {environment_advice()}"
    no_space = (
        "failed to map segment",
        "annot allocate memory",
        "Resource temporarily unavailable",
        "bad_alloc",
        "new thread",
    )
    if isinstance(error, MemoryError) or any(words in text for words in no_space):
        return (
            f"the process ran out of memory or threads ({text or 'MemoryError'}). Its libraries "
            "take several gigabytes of address space: raise the limits (`ulimit -v unlimited`, "
            "`ulimit -u`, or the batch system's limits)."
        )
    if "libcudnn" in text or "libcublas" in text:
        library = text.split(":")[0]
        return (
            f"`import oneflow` needs {library}, even without a GPU, and did not find it. Install "
            "nvidia-cudnn-cu11==8.5.0.96 and nvidia-cublas-cu11==11.10.3.66 into the same "
            "site-packages as oneflow, or add the system's cuDNN 8 and cuBLAS 11 to "
            "LD_LIBRARY_PATH."
        )
    return None


def explain_versions() -> str | None:
    """Return one line that explains what to install if numpy or protobuf is too new for oneflow
    0.9.0, or None.

    With numpy 2, oneflow can be imported but `flow.tensor(array)` fails later. With protobuf 4, the
    import fails.
    """
    for package, module, end, advice in _TOO_NEW:
        version = str(
            getattr(sys.modules.get(module), "__version__", None)
            or installed_version(package)
            or "0"
        )
        major = version.partition(".")[0]
        by_python = (
            package == "protobuf"
            and os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION") == "python"
        )
        if major.isdecimal() and int(major) >= end and not by_python:
            return (
                f"{package} {version} is installed in {sys.prefix}, but oneflow 0.9.0 only works "
                f"with {package} < {end}. Run `pip install {advice}` there. Or use another "
                f"environment: {environment_advice()}"
            )
    return None


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
