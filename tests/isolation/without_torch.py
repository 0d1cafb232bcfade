"""A root that imports no torch, for tests of who forks whom: its workers answer each request that something is broken.

All but ``preload`` is the real one. A root with torch takes three seconds of a core before it forks its first server.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from types import ModuleType

from normcheck.isolation import forkserver, server
from normcheck.isolation.messages import Inbox, packed, received
from normcheck.isolation.settling import settle

_IMPORT = "from normcheck.isolation import server"
ROOT = forkserver._ROOT.replace(_IMPORT, "from tests.isolation.without_torch import main")
ROOT = ROOT.replace("server.main", "main")
"""What the root of this process runs, once it is ``forkserver._ROOT``."""


def main(number: int, door: int, modules: Sequence[str]) -> None:
    """Be the root; see ``server.main``."""
    preload = ModuleType("normcheck.isolation.preload")
    preload.serve = serve  # type: ignore[attr-defined]
    sys.modules[preload.__name__] = preload
    server.main(number, door, modules)


def serve(control: socket.socket) -> None:
    """A worker, as far as whoever starts it can tell."""
    inbox = Inbox()
    begun, (_, output), _, _ = socket.recv_fds(control, 1 << 16, 2)
    inbox.add(begun)
    received(control, inbox)
    settle(output)
    while (message := received(control, inbox)) is not None:
        control.sendall(packed({"broken": {}, "number": message.get("number")}))
