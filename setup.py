"""Install libai: `pip install -e .` (the exact pins of a tested environment are in
requirements/core.lock).
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def read_requirements(name: str) -> list:
    """Return the requirement lines of `requirements/<name>`, without comments."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def read_version() -> str:
    """Return `libai.__version__` without importing libai."""
    source = (ROOT / "libai" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('libai/__init__.py has no line `__version__ = "…"`')
    return found.group(1)


def list_native_sources() -> list:
    """Return the C++ files of libai/native, which are compiled where they are used."""
    folder = ROOT / "libai" / "native"
    return [
        str(path.relative_to(folder))
        for path in sorted((folder / "src").rglob("*"))
        if path.is_file()
    ]


class BuildWithConfigs(build_py):
    """Also copies the shipped configs and the pages for users, which lie next to the package in the
    repository, into it.
    """

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            ignored = shutil.ignore_patterns("__pycache__", "dev")
            for folder in ("configs", "docs"):
                shutil.copytree(
                    ROOT / folder,
                    Path(self.build_lib, "libai", folder),
                    ignore=ignored,
                    dirs_exist_ok=True,
                )


setup(
    # `libai` on PyPI is another project; the package that is imported is `libai`
    name="libai-oneflow",
    version=read_version(),
    description=(
        "Train one OneFlow model eagerly or compiled, with proof that both give the same weights"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["libai", "libai.*"]),
    package_data={
        "libai": ["py.typed"],
        "libai.native": list_native_sources(),
        "libai.data": ["digits.npz"],
        "libai.config.settings": ["other_names.yaml"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["libai = libai.cli.main:main"]},
    # oneflow 0.9.0 has wheels for CPython 3.7 to 3.10; libai is written for and tested on 3.10
    python_requires=">=3.10,<3.11",
    install_requires=read_requirements("core.in"),
    extras_require={
        "dev": read_requirements("dev.in"),
        "docs": read_requirements("docs.in"),
        "wandb": ["wandb", "protobuf<4", "numpy<2"],
        # newer versions need protobuf 5
        "tensorboard": ["tensorboard<2.21", "protobuf<4", "numpy<2", "setuptools<81"],
        "trackio": ["trackio", "numpy<2"],
        "bleu": ["sacrebleu>=2.4"],
    },
)
