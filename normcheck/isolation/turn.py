"""Turns at most of a GPU's memory, for which the processes that judge on one GPU wait in line.

Each process has a share of the memory. A case that needs more than a share runs in a turn, in which the share does not
count; other processes go on with smaller cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from normcheck.lock import locked


@contextmanager
def turn() -> Iterator[None]:
    """Within it, this process may use all of its GPU's memory that is free, and no other process has a turn, unless one
    takes too long: then both share what memory there is.
    """
    share = torch.cuda.get_per_process_memory_fraction()
    with locked(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)):
        torch.cuda.set_per_process_memory_fraction(1.0)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(share)
