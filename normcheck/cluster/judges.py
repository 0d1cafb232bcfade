"""The judges of one worker of a cluster: processes that it keeps, gives lines, and ends when nobody asks any more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from normcheck.cluster.lines import Answer
from normcheck.result import JUDGE_DIED


class Judge:
    """A process of ``judge.py``. It may die at any time."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "normcheck.cluster.judge", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",
        )

    def asked(self, line: str) -> str:
        """The answer to ``line``; "" if the process has died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
            answer = stdout.readline()
        except (OSError, ValueError):
            return ""
        return answer if answer.endswith("\n") else ""

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written goes nowhere
                    pipe.close()


class Judges(WorkerPlugin):
    """The judges of a worker: as many as it has threads, each with its part of the machine, and none before it is
    asked.

    ``parts``: name of a worker -> the arguments of its judges. A worker that is not there was started by somebody else,
    who has given it its GPU and its cores.
    """

    def __init__(self, name: str, parts: dict[str, tuple[str, ...]]) -> None:
        self.name, self._parts = name, parts

    def setup(self, worker: Worker) -> None:
        """Dask calls it on each worker, also on one that comes later."""
        self._arguments = (*self._parts.get(str(worker.name), ()), "--share", str(worker.state.nthreads))
        self._free: SimpleQueue[Judge] = SimpleQueue()
        self._all: set[Judge] = set()
        self._lock, self._ended = Lock(), False

    def teardown(self, worker: Worker) -> None:
        """End the judges, in the middle of their work."""
        with self._lock:
            self._ended = True
            judges = list(self._all)
        for judge in judges:
            judge.end()

    def judged(self, line: str) -> str:
        """The answer of a judge. If it dies, another one is asked, once: what kills judges says nothing of a kernel."""
        for _ in range(2):
            judge = self._taken()
            if judge is None:
                break
            answer = judge.asked(line)
            if answer:
                self._free.put(judge)
                return answer
            self._given_up(judge)
        return Answer(failed=JUDGE_DIED).line

    def _taken(self) -> Judge | None:
        with suppress(Empty):
            return self._free.get_nowait()
        with self._lock:
            if self._ended:
                return None
            judge = Judge(self._arguments)
            self._all.add(judge)
        return judge

    def _given_up(self, judge: Judge) -> None:
        with self._lock:
            self._all.discard(judge)
        judge.end()


def judged(line: str, name: str) -> str:
    """The task that a worker runs: the answer of one of its judges, which the plugin ``name`` keeps."""
    plugin = get_worker().plugins[name]
    assert isinstance(plugin, Judges)
    return plugin.judged(line)
