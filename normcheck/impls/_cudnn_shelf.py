"""Plans of cuDNN as files, for the processes of one run: what one has built the next one loads, in 40 ms.

cuDNN itself keeps nothing on disk, as other compilers do. A shelf lives as long as its run: cuDNN, its frontend or the
GPU may be others in the next one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

MOST = 1024
"""Plans on a shelf, of some 100 kB each: a soak goes on for days."""

FOLDER = "NORMCHECK_CUDNN_PLANS"
"""Variable of the environment that says where the shelf is; without it there is none."""


class StoredPlan(NamedTuple):
    """A plan as data. ``numbers``: our name -> the number of cuDNN's tensor; ``data``: the frontend's own bytes."""

    numbers: Mapping[str, int]
    data: bytes


@contextmanager
def shelf() -> Iterator[None]:
    """In the block this process, and those that it starts, have a shelf."""
    with tempfile.TemporaryDirectory(prefix="normcheck-plans-") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def keep(name: str, plan: StoredPlan) -> None:
    """Put a plan on the shelf if it has room, whole or not at all: one that is not there costs time only."""
    path = _path(name)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if len(os.listdir(path.parent)) >= MOST:
            return
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(json.dumps(plan.numbers).encode() + b"\n" + plan.data)
        unfinished.replace(path)


def kept(name: str) -> StoredPlan | None:
    """The plan of this name on the shelf, or None."""
    path = _path(name)
    if path is None:
        return None
    try:
        numbers, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return StoredPlan(json.loads(numbers), data)


def exists() -> bool:
    """Whether there is a shelf."""
    return FOLDER in os.environ


def _path(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder, sha256(name.encode()).hexdigest())
