"""The worker that a client uses next: started ahead of its use, and importing meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from normcheck.isolation import forkserver
from normcheck.isolation.process import Worker
from normcheck.isolation.sandbox import Sandbox


def begun(
    spec: str,
    ops: tuple[str, ...],
    device: str,
    sandbox: Sandbox | None,
    python: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Worker:
    """A new worker that has been asked to import what ``spec`` names, with these variables in its ``environment``.

    ``python``: see ``forkserver``.
    """
    worker = Worker(sandbox, python)
    message = {"do": "load", "spec": spec, "ops": list(ops), "device": device, "environment": dict(environment)}
    worker.send(message)
    return worker


class Spare:
    """At most one worker that is not in use yet. ``begin`` makes one, in an environment's ``python``."""

    def __init__(self, begin: Callable[[], Worker], python: str) -> None:
        self._begin, self._python = begin, python
        self._worker: Worker | None = None

    def start(self) -> None:
        """Start one if there is none, without waiting for it."""
        if self._worker is None:
            self._worker = self._begin()

    def kill(self) -> None:
        """End it, if there is one."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def taken(self) -> Worker:
        """Give it away; a new one if there is none, or if code under test may have damaged it since it was started."""
        if self._worker is not None and not (self._worker.of_this_server and forkserver.sound(self._python)):
            self.kill()
        self.start()
        worker, self._worker = self._worker, None
        assert worker is not None
        return worker
