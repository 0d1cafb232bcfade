"""What stands where an implementation's functions would, whose code is in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normcheck.cases.case import Case
from normcheck.errors import Broken
from normcheck.impls.source_location import NOWHERE, Place
from normcheck.isolation.remote_run import Link
from normcheck.isolation.replies import complain, nonsense


@dataclass(frozen=True)
class Entry:
    """Stands where an implementation's function would: the function itself is in another process."""

    link: Link
    place: Place = NOWHERE

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Never called: ``call`` goes through the link."""
        raise TypeError("this function is in another process")


@dataclass(frozen=True)
class Question:
    """``supports`` or ``model`` of an implementation in another process: a function of the case."""

    link: Link
    what: str

    def __call__(self, case: Case) -> Any:
        """The other process's answer."""
        self.link.post({"do": self.what, "case": str(case)})
        answer = self.link.collect()
        complain(answer)
        if "value" not in answer:
            raise nonsense(self.what, answer)
        return answer["value"]


@dataclass(frozen=True)
class Reason:
    """``unavailable`` of an implementation in another process, which has said why."""

    text: str

    def __call__(self, device: str) -> str:
        """Why it cannot run; it was asked about the device that is used."""
        return self.text


@dataclass(frozen=True)
class Ended:
    """Stands where the functions of a file would, whose import ended its process: every call says so."""

    kind: str
    message: str
    frames: tuple[str, ...]

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Raise what the import came to."""
        raise Broken(self.kind, "", self.message, self.frames)
