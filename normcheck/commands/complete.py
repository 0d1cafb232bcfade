"""What a shell offers after an option. Each imports what it needs when it is asked, and none of it is torch."""

from __future__ import annotations

from collections.abc import Iterable


def ops(incomplete: str) -> list[str]:
    """Names of ops."""
    from normcheck import discovery

    return _starting(discovery.ops(), incomplete)


def implementations(incomplete: str) -> list[str]:
    """Known names, and the Python files beside what is typed."""
    from pathlib import Path

    from normcheck import discovery

    folder, slash, _ = incomplete.rpartition("/")
    files = (f"{folder}{slash}{path.name}" for path in Path(folder or (slash or ".")).glob("*.py"))
    return _starting([*discovery.implementations(), *sorted(files)], incomplete)


def dtypes(incomplete: str) -> list[str]:
    """Dtypes."""
    from normcheck.formats import DTYPES

    return _starting(DTYPES, incomplete)


def devices(incomplete: str) -> list[str]:
    """Devices."""
    return _starting(("auto", "cpu", "cuda"), incomplete)


def profiles(incomplete: str) -> list[str]:
    """Profiles."""
    return _starting(("quick", "ci", "deep"), incomplete)


def reports(incomplete: str) -> list[str]:
    """Formats of reports, with the colon that a path follows."""
    from normcheck import discovery

    return _starting((f"{name}:" for name in discovery.reports()), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
