"""Kernels of Hugging Face's kernels hub: ``hub:OWNER/NAME[@REVISION]:LAYER`` as the path of a file that is here.

The download is made by the hub's own library, in this process, which imports nothing of what it gets; a kernel's
process finds files, and needs no network. A kernel is kept once for each build; the one that fits is taken.
"""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from normcheck.errors import UsageError, error_text, one_line, to_install

PREFIX = "hub:"
LIBRARY = "huggingface_hub"
_FORM = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?:([A-Za-z_]\w*)")


def parts(spec: str) -> tuple[str, str | None, str]:
    """Repository, revision or None, and layer of a spec that begins with PREFIX. Raises UsageError for another form."""
    found = _FORM.fullmatch(spec)
    if found is None:
        raise UsageError(f"impl={one_line(spec, 200)}: expected hub:OWNER/NAME:LAYER or hub:OWNER/NAME@REVISION:LAYER")
    return found[1], found[2], found[3]


@cache
def local(spec: str) -> str:
    """``FILE:LAYER`` for a spec of the hub, once its build is here; any other ``spec`` as it is. Raises UsageError."""
    if not spec.startswith(PREFIX):
        return spec
    repository, revision, layer = parts(spec)
    try:
        library = importlib.import_module(LIBRARY)
    except ImportError:
        raise UsageError(f"impl={spec}: expected {LIBRARY}, which downloads it; {to_install('hub')}") from None
    return f"{_package(_snapshot(library, spec, repository, revision), spec)}:{layer}"


def build_of(names: Sequence[str]) -> str:
    """The one of a kernel's builds that fits this torch and device; "" if none does.

    They are named ``torch-universal``, ``torch-cuda``, ``torch-cpu``, or such as ``torch210-cxx11-cu128-x86_64-linux``.
    """
    import torch

    version = "".join(torch.__version__.split("+")[0].split(".")[:2])
    cuda = (torch.version.cuda or "").replace(".", "")
    own = [f"cu{cuda}"] if torch.cuda.is_available() else ["cpu"]
    exact = [f"torch{version}-cxx11-{one}-{platform.machine()}-linux" for one in own]
    general = ["torch-cuda" if torch.cuda.is_available() else "torch-cpu", "torch-universal"]
    return next((name for name in (*exact, *general) if name in names), "")


def _snapshot(library: Any, spec: str, repository: str, revision: str | None) -> Path:
    """The folder of the build that fits: as it is now on the hub, or, without network, as it was kept."""
    try:
        files = library.HfApi().list_repo_files(repository, revision=revision)
        build = _fitting(spec, sorted({file.split("/")[1] for file in files if re.match("build/[^/]+/", file)}))
        folder = library.snapshot_download(repository, revision=revision, allow_patterns=[f"build/{build}/*"])
    except UsageError:
        raise
    except Exception as error:  # of the network, of the hub, of its library
        try:
            folder = library.snapshot_download(repository, revision=revision, local_files_only=True)
        except Exception:
            why = one_line(error_text(error), 300)
            raise UsageError(
                f"impl={spec}: it cannot be downloaded, and was not before: {why}; expected a network, or FILE.py:NAME"
            ) from None
        kept = Path(folder) / "build"
        build = _fitting(spec, sorted(path.name for path in kept.iterdir()) if kept.is_dir() else [])
    return Path(folder) / "build" / build


def _fitting(spec: str, names: Sequence[str]) -> str:
    build = build_of(names)
    if not build:
        has = one_line(", ".join(names), 400) or "none"
        raise UsageError(f"impl={spec}: its builds are {has}; expected one for this torch and device")
    return build


def _package(build: Path, spec: str) -> Path:
    """The ``__init__.py`` of a build: its own, or that of the one package in it."""
    found = [build / "__init__.py", *sorted(build.glob("*/__init__.py"))]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise UsageError(f"impl={spec}: expected a package in {build.name}")
    return path
