"""The plugin for pytest: a function that is a kernel, or a test that returns one, is a test for each dtype.

Importing this imports no torch: a run of pytest that marks no kernel pays nothing for it.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from normcheck.cases.dtypes import DTYPES, named
from normcheck.errors import NormcheckError, UsageError, check_names, one_line, one_of, shown

MARK, THIN, DTYPE = "normcheck", "normcheck_thin", "normcheck_dtype"
_THIN_IS = ("fail", "warn")


class ThinCell(UserWarning):
    """The core of a cell was not finished, which ``normcheck_thin = warn`` lets pass, and so does ``allow_thin``."""


@dataclass(frozen=True)
class CellTest:
    """What one test checks: ``kernel``, a function, an ``Implementation``, or what ``--impl`` takes, in one dtype.

    ``name``: that of one implementation, if ``kernel`` names several. ``by_name``: whether somebody named the dtype;
    then a kernel that does not have it fails, and is not skipped. ``options``: those of ``normcheck.verify``.
    """

    kernel: Any
    op: str
    dtype: str
    by_name: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def check(self) -> None:
        """Fail the test unless the kernel passes; its text is the report of ``normcheck verify``, without a traceback.

        The options of pytest's command line come before those of the mark.
        """
        from normcheck.api import run_of_cell, told

        try:
            thin, given = _given()
            options = {**self.options, **given}
            options["allow_thin"] = thin == "warn" or bool(options.get("allow_thin"))
            run = run_of_cell(self.kernel, op=self.op, dtype=self.dtype, name=self.name, **options)
        except (NormcheckError, TypeError) as error:
            pytest.fail(f"normcheck: {error}", pytrace=False)
        if not self.by_name and all(verdict.status == "skip" for verdict in run.verdicts):
            pytest.skip("; ".join(verdict.detail for verdict in run.verdicts))
        if run.exit_code:
            pytest.fail(told(run), pytrace=False)
        if any(verdict.status == "thin" for verdict in run.verdicts):
            warnings.warn(ThinCell(told(run)), stacklevel=2)


_config: pytest.Config | None = None
"""Of the run that goes on, which a test of ``cells`` cannot hand on."""


def _given() -> tuple[str, dict[str, Any]]:
    """What a thin cell is, and the options of the command line. Raises UsageError."""
    if _config is None:
        return _THIN_IS[0], {}
    options = {name: _config.getoption(f"normcheck_{name}") for name in ("profile", "seed")}
    thin = str(_config.getini(THIN))
    check_names(THIN, (thin,), _THIN_IS)
    return thin, {name: value for name, value in options.items() if value is not None}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options and a key of the configuration."""
    group = parser.getgroup("normcheck", "kernels marked normcheck")
    profile = "How much a cell may cost, whatever its mark says: quick, ci or deep."
    group.addoption("--normcheck-profile", metavar="NAME", help=profile)
    group.addoption("--normcheck-seed", type=int, help="Draws the cases, whatever a mark says.")
    parser.addini(THIN, "fail (default) or warn: what a cell is whose core was not finished", default=_THIN_IS[0])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and keep the configuration for ``CellTest``. Raises pytest.UsageError for a wrong profile."""
    global _config
    if profile := config.getoption("normcheck_profile"):
        from normcheck.gate.options import PROMISING

        if profile not in PROMISING:
            raise pytest.UsageError(f"normcheck-profile={one_line(profile, 60)}: expected {one_of(PROMISING)}")
    _config = config
    config.addinivalue_line(
        "markers",
        f"{MARK}(op, dtypes, **options): the function is a kernel, or returns one, and is held to the op by "
        "normcheck, a test for each dtype; options are those of normcheck.verify",
    )


def pytest_unconfigure() -> None:
    """Forget the configuration."""
    global _config
    _config = None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[KernelItem] | None:
    """A test for each dtype of a marked function that is the kernel: one not named as a test, or whose first is x."""
    marks = getattr(obj, "__dict__", {}).get("pytestmark", ())
    mark = next((mark for mark in marks if mark.name == MARK), None)
    if mark is None or not callable(obj) or isinstance(obj, type):
        return None
    if collector.funcnamefilter(name) and next(iter(inspect.signature(obj).parameters), "") != "x":
        return None  # a test, which returns the kernel
    if not isinstance(collector, pytest.Module):
        raise collector.CollectError(f"{name}: expected a kernel that is a function of a module, not of a class")
    kernels = collector.stash.setdefault(_KERNELS, set())
    if id(obj) in kernels:  # under another name
        return []
    kernels.add(id(obj))
    try:
        tests = _asked(mark, f"{_importable(collector)}:{name}")
    except UsageError as error:
        raise collector.CollectError(f"{name}: {error}") from None
    return [KernelItem.of(collector, name, obj, test, marks) for test in tests]


_KERNELS = pytest.StashKey[set[int]]()


def _importable(module: pytest.Module) -> str:
    """How another process imports this module: by its name if it lies in a package on the path, else as a file."""
    package, dot, _ = module.obj.__name__.partition(".")
    found = PathFinder.find_spec(package) if dot else None
    inside = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    if any(place in module.path.parents for place in inside):
        return str(module.obj.__name__)
    return os.path.relpath(module.path)


def _asked(mark: pytest.Mark, kernel: Any = None) -> list[CellTest]:
    """A test of ``kernel`` for each dtype that the mark names, or for all. Raises UsageError."""
    options = dict(mark.kwargs)
    if mark.args:
        raise UsageError(f"{MARK}={shown(mark.args)}: expected op=..., dtypes=... by name")
    op, dtypes = options.pop("op", ""), options.pop("dtypes", None)
    for name in options.keys() & {"dtype", "case", "name", "kernel"}:
        raise UsageError(f"{name}={shown(options[name])}: expected dtypes, op and the options of normcheck.verify")
    wanted = _dtypes(dtypes)
    return [CellTest(kernel, op, dtype, dtypes is not None, options) for dtype in wanted]


def _dtypes(given: object) -> tuple[str, ...]:
    """The dtypes that somebody names, all for None. Raises UsageError."""
    several = [given] if isinstance(given, str) else given
    if several is None:
        return DTYPES
    if not (isinstance(several, list | tuple) and several and all(isinstance(each, str) for each in several)):
        raise UsageError(f"dtypes={shown(given)}: expected {one_of(DTYPES)}, or a list of them")
    wanted = tuple(dict.fromkeys(map(named, several)))
    check_names("dtypes", wanted, DTYPES)
    return wanted


class KernelItem(pytest.Item):
    """The test of a function that is a kernel, in one dtype. It runs in processes of its own, so it may crash."""

    test: CellTest
    line: int

    @classmethod
    def of(
        cls, collector: pytest.Module, name: str, kernel: Any, test: CellTest, marks: Sequence[pytest.Mark]
    ) -> KernelItem:
        """The item of ``kernel``, which has all of its ``marks``."""
        title = f"{name}[{test.dtype}]"
        nodeid = f"{collector.nodeid}::{title}"  # as text, of which pytest reads the parameter: --lf compares it
        item: KernelItem = cls.from_parent(collector, name=title, nodeid=nodeid)
        code = getattr(inspect.unwrap(kernel), "__code__", None)
        item.test, item.line = test, code.co_firstlineno - 1 if code is not None else 0
        item.own_markers.extend(marks)
        item.keywords.update({mark.name: mark for mark in marks})
        return item

    def runtest(self) -> None:
        """Judge the cell."""
        self.test.check()

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the kernel begins."""
        return self.path, self.line, self.name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A marked test that returns its kernel runs for each dtype."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is not None:
        tests = _asked(mark)
        metafunc.fixturenames.append(DTYPE)
        metafunc.parametrize(DTYPE, [pytest.param(test, id=test.dtype) for test in tests])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Judge what a marked test returns, in this process."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker(MARK) is None:
        return None
    test = pyfuncitem.callspec.params[DTYPE]
    assert isinstance(test, CellTest)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    kernel = pyfuncitem.obj(**arguments)
    replace(test, kernel=kernel).check()
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """The process that kernels' processes are forked from imports torch while this one does."""
    items = [item for item in session.items if isinstance(item, KernelItem)]
    if items and not session.config.option.collectonly:
        from normcheck.isolation.forkserver import start_early

        start_early(str(items[0].test.options.get("device", "auto")))


def cells(
    impl: str, *, op: str | Sequence[str] = (), dtypes: str | Sequence[str] | None = None, **options: Any
) -> list[Any]:
    """The cells of ``impl`` for ``pytest.mark.parametrize``; each has ``check()``, which fails the test.

    ``impl``: as for ``--impl``; a file may also lie beside the one that calls this. It is imported, and runs, in
    processes of its own. ``op``, ``dtypes``: those to check, all that it declares by default. ``options``: those of
    ``normcheck.verify``. Raises UsageError if there is nothing of the kind.
    """
    if getattr(sys.modules.get(_WORKER), "serving", False):
        return []  # a kernel of the file that calls this is imported: no test will run here
    from normcheck.gate.prepare import selected
    from normcheck.runner.device import device_for

    file, colon, name = impl.partition(":")
    if file.endswith(".py") and not Path(file).is_file():
        impl = os.path.relpath(Path(sys._getframe(1).f_code.co_filename).parent / file) + colon + name
    ops = (op,) if isinstance(op, str) else tuple(op)
    found = selected(impl, ops, device_for(str(options.get("device", "auto"))), _IMPORT_SECONDS, isolation=True)
    tests = [
        CellTest(impl, i.op, dtype, dtypes is not None, options, i.name)
        for i in found
        for dtype in _dtypes(dtypes)
        if dtypes is not None or dtype in i.dtypes
    ]
    return [pytest.param(test, id=f"{test.op}-{test.name}-{test.dtype}") for test in tests]


_IMPORT_SECONDS = 60.0

_WORKER = "normcheck.isolation.worker"
"""The module that says whether this is a kernel's process."""
