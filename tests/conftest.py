"""What every test is run with, and the fixtures that more than one room uses."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import unified_diff
from itertools import islice
from pathlib import Path

import pytest
import torch

from normcheck.cases.sizes import Extent
from normcheck.gate import unchanged, workers
from normcheck.gate.plan import PROFILES
from tests.command_line import Cli, KernelFile, normcheck

os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""For all that is started from here: a fork of a process with torch in it takes 28 ms of a core in place of 46, as its
heap lies in huge pages. Thousands are forked."""


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: many a test waits for a process to die, or for a time limit."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: at the end there are short ones, for whichever process is ready."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/isolation/"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no test's garbage collection walks through torch."""
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the processes of a run: for small tensors a second one costs more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def few_files_that_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process looks at normcheck's own files alone, before and after: to look at torch's 2500 as well
    took a third of a short run. ``gate/test_unchanged.py`` looks at all, as does each run in a process of its own.
    """
    monkeypatch.setattr(unchanged, "PACKAGES", ("normcheck",))


@pytest.fixture(autouse=True)
def cells_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process judges its cells in it, one after the other, however many cores there are: what a test has
    replaced is replaced here alone.
    """
    monkeypatch.setattr(workers, "cores_here", lambda: workers.CORES_A_CELL)


@pytest.fixture
def recorded() -> Callable[[str, str], None]:
    """``recorded(name, text)``: the file of this name in golden/ has this text. NORMCHECK_UPDATE_GOLDEN=1 writes it.

    No library: pytest-regressions does not see a last newline that is missing, nor tell a file that no test asks for;
    syrupy tells it, in folders and under names of its own. Here the test beside each that records tells it.
    """

    def check(name: str, text: str) -> None:
        path = Path(__file__).parents[1] / "golden" / name
        if os.environ.get("NORMCHECK_UPDATE_GOLDEN") == "1":
            path.write_text(text, encoding="utf-8")
        kept = path.read_text(encoding="utf-8")
        if text != kept:
            diff = islice(unified_diff(kept.splitlines(), text.splitlines(), name, "now", lineterm=""), 60)
            pytest.fail("\n".join([f"golden/{name} differs; NORMCHECK_UPDATE_GOLDEN=1 writes it again", *diff]))

    return check


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """normcheck in this process, in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return normcheck


@pytest.fixture
def small_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core of quick without its large sizes: half of its cases, in a tenth of its time, and a pass needs them all.

    For a test of what becomes of a kernel that passes; that right kernels pass at every size is the audit's promise.
    """
    few = Extent(rows=20, paired_rows=20, elements=20_000, heights=1, widths=1, dear_rows=20, columns=300, fine=False)
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], extent=few))


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile quick without a second to shrink a case or explain it: for a test of what is found, not of words."""
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0))


@pytest.fixture
def kernel_file(tmp_path: Path) -> KernelFile:
    """Write a kernel's source to a file of the test's folder and give its path.

    Without ``name`` each source has a name of its own: a process loads a file once.
    """

    def kernel_file(*parts: str, name: str = "") -> Path:
        source = "\n".join(parts)
        path = tmp_path / (name or f"kernel_{abs(hash((tmp_path, source)))}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    return kernel_file
