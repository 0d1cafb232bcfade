"""What can be wrong with the options of a run, as far as it shows before torch is imported, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec

from normcheck.errors import UsageError, one_line, one_of, to_install
from normcheck.files import module_of, writable
from normcheck.gate.options import VerifyOptions
from normcheck.gate.requirements import EVERY_CELL, requirement
from normcheck.impls import discovery
from normcheck.reports.report import formats
from normcheck.reports.targets import Target, targets


def looked_at(options: VerifyOptions) -> None:
    """Raise the UsageError that the run would raise, if it needs no torch to be seen."""
    for spec in options.impl:
        discovery.looked_at(spec, options.op)
    if options.report:
        targets_of(options)
    if options.trace and not writable(options.trace):
        raise UsageError(f"trace={one_line(options.trace, 200)}: expected a path of a file that can be written")
    shard_parts(options.shard)
    if options.scheduler and find_spec("distributed") is None:
        raise UsageError(f"scheduler={options.scheduler}: expected distributed; {to_install('cluster')}")
    known = discovery.implementations()
    if all(spec in known for spec in options.impl) and "require" not in options.from_config:
        required(options.require, options.impl or tuple(known))


def required(texts: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError for a requirement of none of these implementations."""
    for text in texts:
        if requirement(text).name not in (*names, EVERY_CELL):
            raise UsageError(f"require={text}: expected {one_of(sorted(names))}, which are what is checked")


def shard_parts(text: str) -> tuple[int, int]:
    """(K, N) of ``--shard K/N``; (1, 1) without it. Raises UsageError."""
    if not text:
        return (1, 1)
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"shard={one_line(text, 60)}: expected K/N with 1 <= K <= N <= 9999")
    return int(match[1]), int(match[2])


def targets_of(options: VerifyOptions, read: Sequence[str] = ()) -> tuple[Target, ...]:
    """Where the reports go. Raises UsageError for a file that the run reads: one of ``read`` or of another option."""
    files = map(module_of, options.impl)
    read = (*files, *read, options.known_failures, options.baseline, options.config)
    return targets(options.report, tuple(formats()), read, {name: format.needs for name, format in formats().items()})
