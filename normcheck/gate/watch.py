"""``normcheck verify --watch``: a run after each save, on one screen, with what failed before in front.

This process, with torch in it, and the server of kernels' processes stay; only the files under test are imported again.
A run that is under way when a file is saved is given up for the next one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import torch
from rich.console import Console

from normcheck.errors import ExitCode, NormcheckError, UsageError, error_text, one_line, to_install
from normcheck.files import module_of
from normcheck.gate.decision import concluded, terms_of
from normcheck.gate.early import targets_of
from normcheck.gate.engine import Engine
from normcheck.gate.options import VerifyOptions
from normcheck.gate.prepare import prepared
from normcheck.gate.run import doubted, publish, run_of, swept
from normcheck.gate.unchanged import Files
from normcheck.isolation import forkserver
from normcheck.isolation.sandbox import RUN_FOLDER
from normcheck.reports import terminal
from normcheck.reports._cells import name_of
from normcheck.reports._failure import put_failure
from normcheck.reports._text import put
from normcheck.reports.targets import screen
from normcheck.result import Verdict
from normcheck.runner.interruption import interruptible

_SUFFIXES = (".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".toml")
_PATIENCE_SECONDS = 1.0  # for a case that is under way when a file is saved
_NAMED = 3


def watched(options: VerifyOptions) -> tuple[str, ...]:
    """The folders of the files under test. Raises UsageError if there is none, or if nothing can watch them."""
    if find_spec("watchfiles") is None:
        raise UsageError(f"watch: expected watchfiles; {to_install('watch')}")
    folders = dict.fromkeys(filter(None, map(_folder, options.impl)))
    if not folders:
        raise UsageError("watch: expected --impl with a file of yours, such as mine.py; nothing else changes")
    return tuple(folders)


def _folder(spec: str) -> str:
    """The folder of the file or package that ``spec`` names, or "". No code is run for it."""
    name = module_of(spec)
    if name.endswith(".py"):
        return str(Path(name).resolve().parent)
    with suppress(ImportError, ValueError):
        package = find_spec(name.partition(".")[0]) if name else None
        if package is not None and package.origin and Path(package.origin).is_file():
            return str(Path(package.origin).parent)
    return ""


class Saves:
    """Whether a file under one of ``folders`` was saved, seen by a thread.

    ``names``: of those that were saved last. A run that is under way should then end by itself, see ``saved``; it is
    interrupted if it does not within a second.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._saved, self._stop, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._running = threading.Lock()
        self._ended.set()
        self._failed = ""  # why the thread ended
        self.names: tuple[str, ...] = ()

    def __enter__(self) -> Saves:
        self._thread = threading.Thread(target=self._look, name="normcheck-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    @property
    def saved(self) -> bool:
        """Whether a file was saved since the present run began."""
        return self._saved.is_set()

    def wait(self) -> None:
        """Wait until a file is saved. Raises NormcheckError if nobody can see that any more."""
        while not self._failed and not self._saved.wait(1.0):
            pass
        if self._failed:
            raise NormcheckError(f"watch: expected folders that can be watched ({self._failed})")

    @contextmanager
    def run(self) -> Iterator[None]:
        """A run in the block. Raises KeyboardInterrupt if a file was saved, and the run did not end by itself."""
        self._saved.clear()
        self._ended.clear()
        try:
            yield
        finally:
            with self._running:
                self._ended.set()

    def _look(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._failed = error_text(error)
            self._saved.set()

    def _watch(self) -> None:
        from watchfiles import Change, DefaultFilter, watch

        class Sources(DefaultFilter):
            """Sources, but not in the folders of tools, such as .git and __pycache__."""

            def __call__(self, change: Change, path: str) -> bool:
                own = f"{os.sep}{RUN_FOLDER}" in path  # what kernels compile
                return path.endswith(_SUFFIXES) and not own and super().__call__(change, path)

        for changes in watch(
            *self._folders,
            watch_filter=Sources(),
            debounce=200,
            step=20,
            rust_timeout=200,
            stop_event=self._stop,
            raise_interrupt=False,
        ):
            self.names = tuple(sorted({os.path.basename(path) for _, path in changes}))
            self._saved.set()
            if self._ended.wait(_PATIENCE_SECONDS):
                continue
            with self._running:
                if not self._ended.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def watch(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files], engine: Engine) -> int:
    """Run ``options``, and again after each save, until Ctrl-C; returns the exit code of the last whole run.

    Raises UsageError before anything runs.
    """
    folders = watched(options)
    torch.set_num_threads(1)  # as in any other run
    stream = screen(targets_of(options))
    console = terminal.console_for(stream)
    code = int(ExitCode.INTERRUPTED)
    with TemporaryDirectory(prefix="normcheck-watch-") as kept, Saves(folders) as saves, interruptible(signal.SIGINT):
        options = options if options.database else replace(options, database=kept)
        try:
            while True:
                try:
                    with saves.run():
                        code = _run(options, argv, files, saves, stream, console, engine)
                except NormcheckError as error:  # also a file that cannot be imported while it is edited
                    print(f"normcheck: {one_line(str(error))}", file=sys.stderr)
                    code = int(error.exit_code)
                except KeyboardInterrupt:
                    if not saves.saved:
                        raise
                if saves.saved:
                    forkserver.replace()  # whatever it was asked for when the run was given up
                    continue
                if code == ExitCode.INTERRUPTED:
                    return code
                put(
                    console,
                    (f"Watching {', '.join(folders)}: what is saved is checked again; Ctrl-C ends.", "dim"),
                    wrap=False,
                )
                saves.wait()
        except KeyboardInterrupt:
            return code


def _run(
    options: VerifyOptions,
    argv: tuple[str, ...],
    files: Future[Files],
    saves: Saves,
    stream: TextIO,
    console: Console,
    engine: Engine,
) -> int:
    """One run: first the cases that failed before, then all else. Its exit code; it publishes nothing if given up."""
    start = time.perf_counter()
    begun = files.result()
    _clear(console)
    if saves.names:
        more = f" and {len(saves.names) - _NAMED} more" if len(saves.names) > _NAMED else ""
        put(console, (f"{time.strftime('%H:%M:%S')} saved: {', '.join(saves.names[:_NAMED])}{more}", "dim"))
    plan = prepared(options)
    terms = terms_of(options, plan.required)
    before = [cell for cell in plan.cells if cell.key in plan.replays]
    found: dict[object, Verdict] = {}
    complete = True
    if before:
        again = replace(plan, cells=tuple(before), profile=replace(plan.profile, max_examples=0))
        quiet = replace(options, quiet=True, verbose=False)
        verdicts, complete = swept(again, stream, quiet, terms, engine, lambda: saves.saved)
        for verdict in verdicts:
            _put_again(console, verdict)
        found = {verdict.key: verdict for verdict in verdicts if verdict.status == "fail"}
    rest = replace(plan, cells=tuple(cell for cell in plan.cells if cell.key not in found))
    if complete and rest.cells:
        verdicts, complete = swept(rest, stream, options, terms, engine, lambda: saves.saved)
        found |= {verdict.key: verdict for verdict in verdicts}
    if saves.saved:
        return int(ExitCode.INTERRUPTED)
    told = tuple(found[cell.key] for cell in plan.cells if cell.key in found)
    result = run_of(options, plan, told, start, engine.environment(plan.device), argv)
    result = concluded(replace(result, complete=complete), terms)
    result = doubted(result, begun.changed())
    _clear(console)
    return publish(result, targets_of(options), stream, cells=True, verbosity=options.verbosity)


def _clear(console: Console) -> None:
    if console.is_terminal:
        console.clear()


def _put_again(console: Console, verdict: Verdict) -> None:
    """Print what became of a cell that failed before."""
    if verdict.failure is not None:
        put_failure(console, name_of(verdict.key), verdict.failure, known=verdict.known)
    else:
        put(console, ("passes now: ", "green"), f"what failed before in {name_of(verdict.key)}")
