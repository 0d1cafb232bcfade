"""What can be wrong with a comparison, as far as it shows before torch is imported, which takes seconds."""

from __future__ import annotations

from normcheck.compare.options import FORMATS, CompareOptions
from normcheck.files import module_of
from normcheck.impls import discovery
from normcheck.isolation import interpreter
from normcheck.reports.targets import Target, targets


def looked_at(a: str, b: str, options: CompareOptions) -> None:
    """Raise the UsageError that the comparison would raise, if it needs no torch to be seen."""
    for spec in (a, b):
        discovery.looked_at(spec, options.op)
    targets_of(a, b, options)
    if options.interpreter:
        interpreter.found(options.interpreter)


def targets_of(a: str, b: str, options: CompareOptions) -> tuple[Target, ...]:
    """Where the reports go. Raises UsageError for a file that the run reads."""
    return targets(options.report, FORMATS, [module_of(a), module_of(b), options.interpreter])
