"""The job that ``normcheck verify`` has: a run, rounds without end, a run after each save, or a loader's cell."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from normcheck.gate.engine import Engine, ThisMachine
from normcheck.gate.options import VerifyOptions
from normcheck.gate.unchanged import Files

Job = Callable[[VerifyOptions, tuple[str, ...], Future[Files]], int]
"""Checks what the options ask for, given the command line and the files that judge; returns the exit code."""


def job_of(options: VerifyOptions) -> Job:
    """The job that ``options`` ask for. Its module is imported here, and no other's."""
    if options.loads:
        from normcheck.loaders.job import check_loaded

        return check_loaded
    if options.profile == "soak":
        from normcheck.gate.soak import soak as judged
    elif options.watch:
        from normcheck.gate.watch import watch as judged
    else:
        from normcheck.gate.run import run as judged

    def job(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
        with engine_of(options) as engine:
            return judged(options, argv, files, engine)

    return job


def engine_of(options: VerifyOptions) -> AbstractContextManager[Engine]:
    """Who judges the cells, while the context is open."""
    if not options.scheduler:
        return ThisMachine()
    from normcheck.cluster.engine import cluster_of

    return cluster_of(options)
