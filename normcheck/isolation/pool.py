"""Job pool whose processes may die: each job that was running then runs again, alone, before it is blamed.

Jobs and results are plain data. Processes are spawned, not forked, so that they inherit nothing from this one. They
end with this one, however it ends.

The package pebble could replace ``_until_a_death``: it says whose process died. Running a job again, running it apart
and ending at Ctrl-C would stay here, so pebble is no dependency.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from normcheck.errors import NormcheckError

Job = TypeVar("Job")
Done = TypeVar("Done")
Start = Callable[[], None]
Choice = Callable[[Sequence[Job], Sequence[Job]], int]
"""Which of the jobs that wait begins when a process is free, by its place among them, beside those that run."""


def spread(
    work: Callable[[Job], Done],
    jobs: Sequence[Job],
    *,
    workers: int,
    start: Start,
    died: Callable[[Job], Done],
    apart: Callable[[Job], bool],
    choose: Choice[Job] = lambda waiting, running: 0,
    first: Start | None = None,
    begun: Pool | None = None,
) -> Iterator[tuple[int, Done]]:
    """Yield (index, work(job)) for every job, in the order in which they finish.

    ``start``, ``first``: see ``Pool``; they and ``work`` are functions that a module defines by name. A job whose
    process dies twice, the second time while it runs alone, has the result ``died(job)``. If ``apart(job)``, the job
    has a process of its own from the beginning. With one worker everything runs in this process, and dies with it.
    ``choose``: see ``Choice``. ``begun``: the processes to use at first.
    """
    if workers == 1:
        yield from ((index, work(job)) for index, job in enumerate(jobs))
        return
    waiting = [(index, job) for index, job in enumerate(jobs) if not apart(job)]
    while waiting:
        running: dict[Future[Done], tuple[int, Job]] = {}
        with begun or Pool(workers, start, first) as pool:
            yield from _until_a_death(pool.executor, workers, work, waiting, running, choose)
        begun = None
        for index, job in running.values():
            yield index, _alone(work, job, start, died)
    for index, job in enumerate(jobs):
        if apart(job):
            yield index, _alone(work, job, start, died)


def _until_a_death(
    pool: ProcessPoolExecutor,
    workers: int,
    work: Callable[[Job], Done],
    waiting: list[tuple[int, Job]],
    running: dict[Future[Done], tuple[int, Job]],
    choose: Choice[Job],
) -> Iterator[tuple[int, Done]]:
    """Yield results until no job is left or a process has died: one of the jobs in ``running`` then killed it.

    No more jobs are submitted than there are processes, so that these suspects are few.
    """
    try:
        for done in in_turn(pool, lambda: workers, work, waiting, running, choose):
            dead = False
            for future in done:
                if isinstance(future.exception(), BrokenProcessPool):
                    dead = True
                    continue
                result = future.result()
                yield running.pop(future)[0], result
            if dead:
                return
    except BrokenProcessPool:
        return


def in_turn(
    executor: Executor,
    most: Callable[[], int],
    work: Callable[[Job], Done],
    waiting: list[tuple[int, Job]],
    running: dict[Future[Done], tuple[int, Job]],
    choose: Choice[Job],
    seconds: float | None = None,
) -> Iterator[Collection[Future[Done]]]:
    """Hand ``waiting`` to ``executor``, never more than ``most()`` at a time, until all is done.

    Yields those that are done, which the caller takes out of ``running``; none, if ``seconds`` pass without any.
    """
    while waiting or running:
        while waiting and len(running) < most():
            chosen = waiting.pop(choose([job for _, job in waiting], [job for _, job in running.values()]))
            running[executor.submit(work, chosen[1])] = chosen
        yield _waited_for(running, seconds)


def _waited_for(running: Collection[Future[Done]], seconds: float | None) -> Collection[Future[Done]]:
    """Those that are done once one is, or so many seconds have passed.

    An interrupt in the wait may leave its lock released, about which the lock then raises in place of the interrupt.
    """
    try:
        return wait(running, timeout=seconds, return_when=FIRST_COMPLETED).done
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def _alone(work: Callable[[Job], Done], job: Job, start: Start, died: Callable[[Job], Done]) -> Done:
    with Pool(1, start) as pool:
        try:
            pool.executor.submit(_nothing).result()
        except BrokenProcessPool:
            raise NormcheckError("a worker process ended before it was given anything to do; try --workers 1") from None
        try:
            return pool.executor.submit(work, job).result()
        except BrokenProcessPool:
            return died(job)


def _nothing() -> None:
    """A job that ends as soon as a process has started."""


class Pool:
    """So many ``workers``, which are spawned processes. Each runs ``first``, and then ``start``, whose modules it has
    imported only then.

    An exception in the block, or Ctrl-C, ends them, instead of waiting for their jobs.
    """

    def __init__(self, workers: int, start: Start, first: Start | None = None) -> None:
        self._others = multiprocessing.active_children()
        self._workers = workers
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_started, initargs=(first, pickle.dumps(start))
        )

    def begin(self) -> None:
        """Start all processes now, and not with the first jobs."""
        with suppress(BrokenProcessPool):  # who gives them a job meets it again
            for _ in range(self._workers):
                self.executor.submit(_nothing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if error is not None:
            self._terminate()
        self.executor.shutdown(cancel_futures=True)

    def end(self) -> None:
        """End the processes, whatever they do."""
        self._terminate()
        self.executor.shutdown(cancel_futures=True)

    def _terminate(self) -> None:
        for child in multiprocessing.active_children():
            if child not in self._others:
                child.terminate()


def _started(first: Start | None, start: bytes) -> None:
    """Begin a new process, at last by the pickled ``start``, whose modules are imported here, while no garbage is
    looked for.

    Imports make none that matters, and a seventh of their time went into that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the first one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()
    if first is not None:
        first()
    pickle.loads(start)()
    gc.enable()


def _end_with_parent() -> None:
    """Wait until the first process ends, then end this one, which would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
