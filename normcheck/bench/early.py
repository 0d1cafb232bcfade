"""What can be wrong with a bench, as far as it shows before torch is imported, which takes seconds."""

from __future__ import annotations

from normcheck.bench import plot
from normcheck.bench.options import FORMATS, BenchOptions
from normcheck.bench.plan import suite_for
from normcheck.bench.suites import SUITES
from normcheck.impls import discovery
from normcheck.reports._page import NEEDS
from normcheck.reports.targets import Target, targets


def looked_at(options: BenchOptions) -> None:
    """Raise the UsageError that the bench would raise, if it needs no torch to be seen."""
    if options.suite and options.suite not in SUITES:
        return  # that of the judge, which reads options of its own
    targets_of(options)
    suite = suite_for(options, "cpu")  # on any device the same ops
    for spec in options.impl:
        discovery.looked_at(spec, tuple(dict.fromkeys(point.op for point in suite.points)))


def targets_of(options: BenchOptions) -> tuple[Target, ...]:
    """Where the reports go. Raises UsageError, also for a picture that could not be made."""
    found = targets(options.report, FORMATS, needs={"png": ("matplotlib",), "html": NEEDS})
    plot.check(target.path for target in found if target.format == "png")
    return found
