"""Select implementations for processes of their own: a worker imports them, and describes what they declare."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.declared import of_message
from normcheck.cases.ops import OPS
from normcheck.errors import Broken, ImportFailed, UsageError
from normcheck.impls import _hub, discovery, source_location
from normcheck.impls.implementation import Implementation
from normcheck.impls.source_location import NOWHERE, Place
from normcheck.isolation import forkserver
from normcheck.isolation.client import START_SECONDS
from normcheck.isolation.messages import Message
from normcheck.isolation.process import Worker
from normcheck.isolation.replies import broken_of
from normcheck.isolation.sandbox import Reach, Sandbox
from normcheck.isolation.session import ProcessSession
from normcheck.isolation.spare import begun
from normcheck.runner.session import Elsewhere

AT_ONCE = 8
"""So many imports go on side by side."""


def each_selected_apart(
    asked: Mapping[str, tuple[str, ...]], device: str, seconds: float, *, sandboxed: bool = True
) -> Iterator[tuple[str, tuple[Implementation, ...] | ImportFailed]]:
    """``select_apart`` for each spec and its ops, or why it cannot be imported, in their order, while those that follow
    are imported as well. ``sandboxed``: see ``sandbox.Sandbox``.
    """
    started: dict[str, Worker] = {}
    here = {spec: _hub.local(spec) for spec in asked}
    try:
        for number, (spec, ops) in enumerate(asked.items()):
            for following in list(asked)[number : number + AT_ONCE]:
                if following not in started:
                    started[following] = _begun(here[following], asked[following], device, sandboxed)
            found: tuple[Implementation, ...] | ImportFailed
            try:
                found = select_apart(spec, ops, device, seconds, started[spec], sandboxed=sandboxed)
            except ImportFailed as failed:
                found = failed
            yield spec, found
    finally:
        for worker in started.values():
            worker.kill()


def select_apart(
    spec: str,
    ops: tuple[str, ...],
    device: str,
    seconds: float,
    worker: Worker | None = None,
    *,
    sandboxed: bool = True,
    start_seconds: float = START_SECONDS,
    python: str = "",
) -> tuple[Implementation, ...]:
    """Like ``discovery.select``, but a worker imports what ``spec`` names, in ``seconds`` after its start.

    The start itself may take ``start_seconds``, which also holds for the workers that are started later. If the import
    ends or hangs its process, each of ``ops`` gets an implementation whose calls raise that failure. Raises UsageError
    as ``discovery.select`` does, and if the worker sends garbage. ``worker``: one that has been asked already.
    ``python``: the interpreter that imports and runs it, see ``forkserver``.
    """
    spec = _hub.local(spec)
    sandbox = _sandbox(spec, sandboxed)
    try:
        start = partial(begun, spec, ops, device, sandbox, python)
        answer = _imported(start, start_seconds + seconds, worker, python)
    except Broken as broken:
        ended = _Ended(broken.kind, broken.message, broken.frames)
        unknown = ops or tuple(OPS)[:1]
        return tuple(Implementation(name=Path(spec).name, op=op, forward=ended, source=spec) for op in unknown)
    if "usage" in answer:
        raise (ImportFailed if answer.get("import") is True else UsageError)(str(answer["usage"]))
    if "broken" in answer:
        raise UsageError(f"impl={spec}: {broken_of(answer['broken'])}")
    found = answer.get("found")
    if not isinstance(found, list):
        raise _nonsense(spec)
    return tuple(_implementation(spec, declared, device, sandbox, start_seconds, python) for declared in found)


def reach(file: str, *, sandboxed: bool = True) -> Reach:
    """What a kernel's process can do to others here. ``file``: one that it should not be able to change."""
    worker = Worker(_sandbox(file, sandboxed))
    try:
        answer = worker.ask({"do": "reach", "file": file, "judge": os.getpid()}, START_SECONDS, "its reach")
    finally:
        worker.kill()
    return Reach(**{name: bool(answer[name]) for name in Reach.__dataclass_fields__})


def _sandbox(spec: str, sandboxed: bool) -> Sandbox | None:
    return Sandbox.of(spec) if sandboxed else None


def _begun(spec: str, ops: tuple[str, ...], device: str, sandboxed: bool) -> Worker:
    return begun(spec, ops, device, _sandbox(spec, sandboxed))


def _imported(start: Callable[[], Worker], seconds: float, worker: Worker | None, python: str) -> Message:
    """The answer of a worker that lives for this import alone. If it crashes, one from a new server tries again.

    A new server takes the other imports along that go on: they crash, and try again as well.
    """
    try:
        return _answer(worker or start(), seconds)
    except Broken as broken:
        if broken.kind != "crash":
            raise
    forkserver.replace(python)
    return _answer(start(), seconds)


def _answer(worker: Worker, seconds: float) -> Message:
    try:
        return worker.receive(seconds, "its import")
    finally:
        worker.kill()


def _implementation(
    spec: str, declared: Mapping[str, Any], device: str, sandbox: Sandbox | None, start_seconds: float, python: str
) -> Implementation:
    """An implementation in another process, from its description by a worker."""
    try:
        own_backward, model, reason = bool(declared["backward"]), declared["model"], declared["unavailable"]
        op, name = str(declared["op"]), str(declared["name"])
        environment = dict(declared["environment"])
        session = ProcessSession(spec, op, name, device, not own_backward, sandbox, start_seconds, python, environment)
        place, of_backward = map(source_location.place_of, (declared["place"], declared["backward_place"]))
        described = Implementation(
            name=name,
            op=op,
            forward=_Entry(session, place),
            backward=_Entry(session, of_backward) if own_backward else None,
            supports=_Question(session, "supports") if declared["supports"] else None,
            unavailable=_Unavailable(str(reason)) if reason else None,
            model=_Question(session, "model") if model is None else dict(model),
            **of_message(Implementation, declared),
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _nonsense(spec) from None
    return discovery.validated(described, spec)


def _nonsense(spec: str) -> UsageError:
    return UsageError(f"impl={spec}: expected an import that leaves its process alone, which answered nonsense")


@dataclass(frozen=True)
class _Entry(Elsewhere):
    """Stand-in for forward and backward, which are functions of another process."""

    process: ProcessSession
    place: Place = NOWHERE

    @property
    def session(self) -> ProcessSession:
        """The session with that process."""
        return self.process

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Never called: the calls go through ``session``."""
        raise TypeError("this function is in another process")


@dataclass(frozen=True)
class _Question:
    """Stand-in for ``supports`` or ``model``: asks the other process about a case."""

    session: ProcessSession
    what: str

    def __call__(self, case: Case) -> Any:
        """The other process's answer."""
        return self.session.ask(self.what, case)


@dataclass(frozen=True)
class _Unavailable:
    """Stand-in for ``unavailable``: the worker has called it, for the device that is used."""

    reason: str

    def __call__(self, device: str) -> str:
        """Why nothing can run."""
        return self.reason


@dataclass(frozen=True)
class _Ended:
    """Stand-in for the functions of a file whose import ended its process: every call raises that failure."""

    kind: str
    message: str
    frames: tuple[str, ...]

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Raise the failure of the import."""
        raise Broken(self.kind, "", self.message, self.frames)
