"""How a command imports what takes long: torch, and what of normcheck stands on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_once() -> Iterator[None]:
    """No garbage is looked for meanwhile: imports make none that matters, and a seventh of their time went into that.

    What was imported is frozen, since it lives until the end. Otherwise the first collection would walk through it all.
    """
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if looked_for:
            gc.enable()
