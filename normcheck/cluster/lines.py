"""A job for a judge and its answer, as lines of text: no tensor and no code is sent, and nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from normcheck.errors import UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.json_types import Count
from normcheck.options import built
from normcheck.reports.document import checked, once, text_of
from normcheck.result import Verdict

_OF_THE_CALLER = frozenset(
    (
        *("report", "database", "known_failures", "baseline", "timings", "config", "quiet", "verbose", "watch"),
        *("scheduler", "workers", "shard"),
    )
)
"""Options of which a judge knows nothing: what they name is read, written or decided where the command was given."""


@dataclass(frozen=True)
class CellName:
    """A cell by its names: op, implementation, dtype, and how the command line names the implementation."""

    op: str
    implementation: str
    dtype: str
    spec: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a judge does: judge ``cell``, or without one say which cells ``options`` ask for.

    ``options``: those of the command, by name. ``folder``: where it was given, from which its paths are read.
    ``replays``: case lines that are run first. ``shard``: (K, N) if only every N-th case is. ``beside``: how many cells
    are judged side by side on one machine.
    """

    options: Mapping[str, Any]
    folder: str
    cell: CellName | None = None
    replays: tuple[str, ...] = ()
    shard: tuple[Count, Count] = (1, 1)
    beside: Count = 1

    @property
    def line(self) -> str:
        """It as a line, without its end."""
        return text_of(self, indent=None).strip()

    def asked(self) -> VerifyOptions:
        """Its options, checked anew. Raises UsageError."""
        return built(VerifyOptions, {name: _frozen(value) for name, value in self.options.items()})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a judge says: the ``verdict`` of a cell, or the ``cells`` that were asked for, and what the plan says.

    ``usage``: the message of a UsageError, "" if there was none. ``failed``: the message if normcheck itself failed.
    """

    usage: str = ""
    failed: str = ""
    verdict: Verdict | None = None
    device: str = ""
    cells: tuple[CellName, ...] = ()
    required: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """It as a line, without its end."""
        return text_of(self, indent=None).strip()


def sent(options: VerifyOptions) -> dict[str, Any]:
    """The options that a judge must know, by name."""
    return {name: value for name, value in asdict(options).items() if name not in _OF_THE_CALLER}


def job_of(line: str) -> Job:
    """The job in a line. Raises UsageError."""
    return checked(Job, _parsed(line, "job"), "job")


def answer_of(line: str, judge: str) -> Answer:
    """The answer in a line of ``judge``. Raises UsageError."""
    return checked(Answer, _parsed(line, judge), judge)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected a line of JSON ({error})") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
