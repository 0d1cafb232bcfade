"""What a shell offers after an option. Each imports what it needs when it is asked, and none of it is torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def ops(incomplete: str) -> list[str]:
    """Names of ops."""
    from normcheck.impls import discovery

    return _starting(discovery.ops(), incomplete)


def implementations(incomplete: str) -> list[str]:
    """Known names, and the Python files beside what is typed."""
    from pathlib import Path

    from normcheck.impls import discovery

    folder, slash, _ = incomplete.rpartition("/")
    files = (f"{folder}{slash}{path.name}" for path in Path(folder or (slash or ".")).glob("*.py"))
    return _starting([*discovery.implementations(), *sorted(files)], incomplete)


def dtypes(incomplete: str) -> list[str]:
    """Dtypes."""
    from normcheck.cases.dtypes import DTYPES

    return _starting(DTYPES, incomplete)


def _among(*names: str) -> Callable[[str], list[str]]:
    def starting(incomplete: str) -> list[str]:
        return _starting(names, incomplete)

    return starting


devices = _among("auto", "cpu", "cuda")
profiles = _among("quick", "ci", "deep")
audit_reports = _among("json:")
regime_cells = _among("one", "all")
bench_reports = _among("csv:", "json:", "png:")


def outputs(incomplete: str) -> list[str]:
    """Outputs and gradients, of whatever op."""
    from normcheck.cases.ops.op import GRADIENTS
    from normcheck.impls import discovery

    names = [name for op in discovery.ops().values() for name in op.outputs]
    return _starting(dict.fromkeys([*names, *GRADIENTS]), incomplete)


def suites(incomplete: str) -> list[str]:
    """Suites of a benchmark."""
    from normcheck.bench.suites import SUITES

    return _starting(SUITES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Recipes of an audit."""
    from normcheck.audit.recipes import RECIPES

    return _starting(RECIPES, incomplete)


def regimes(incomplete: str) -> list[str]:
    """Regimes of an audit."""
    from normcheck.audit.mutants.regimes import REGIMES

    return _starting((*REGIMES, "all"), incomplete)


def reports(incomplete: str) -> list[str]:
    """Formats of reports, with the colon that a path follows."""
    from normcheck.reports.report import formats

    return _starting((f"{name}:" for name in formats()), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
