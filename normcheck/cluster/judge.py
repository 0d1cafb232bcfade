"""The process that judges for a worker of a cluster: ``python -m normcheck.cluster.judge``, a job a line.

It is not the worker's own process: Dask runs what it is given in threads beside its own, and a job sets limits, signals
and a GPU for all of its process. It ends with the worker, which holds the other end of its input.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import Queue

from normcheck.cases.case_line import parsed
from normcheck.cluster.lines import Answer, CellName, Job, job_of
from normcheck.errors import NormcheckError, UsageError, itself_failed
from normcheck.gate.engine import verdict_of
from normcheck.gate.plan import Replay
from normcheck.gate.prepare import prepared
from normcheck.gate.requirements import EVERY_CELL, sizes_required
from normcheck.gate.unchanged import Files
from normcheck.gate.workers import patience, take_share
from normcheck.runner.environment import environment


def main() -> None:
    """Answer each line of standard input with one of standard output, to which nothing else is written."""
    given = argparse.ArgumentParser()
    given.add_argument("--gpu", default="", help="the GPU that it uses, as in CUDA_VISIBLE_DEVICES")
    given.add_argument("--cores", default="", help="the cores that it and its kernels run on: 0,1")
    given.add_argument("--share", type=int, default=1, help="how many judges share its GPU")
    settings = given.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the first one decides
    if settings.cores:
        os.sched_setaffinity(0, {int(core) for core in settings.cores.split(",")})
    if settings.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpu
    lines: Queue[str] = Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    gc.freeze()
    files = Files()
    while True:
        answers.write(answered(lines.get(), settings.share, files.changed).line + "\n")
        answers.flush()


def _read(lines: Queue[str]) -> None:
    """Hand on the lines of standard input; at its end the worker is gone, and with it whoever waits for an answer."""
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGKILL)  # the present case may take minutes


def answered(line: str, share: int, changed: Callable[[], str]) -> Answer:
    """The answer to a job. ``share``: how many judges share the GPU; ``changed``: which files that judge are others."""
    try:
        job = job_of(line)
        _enter(job.folder)
        answer = _planned(job) if job.cell is None else _judged(job, job.cell, share)
        doubt = changed()
    except UsageError as error:
        return Answer(usage=str(error))
    except NormcheckError as error:
        return Answer(failed=str(error))
    except Exception as error:
        return Answer(failed=itself_failed(error))
    return Answer(failed=doubt) if doubt else answer


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"scheduler: {os.uname().nodename} has no folder {folder} ({error.strerror}): expected the files under "
            "test to lie there as well, as in a file system that all machines share"
        ) from None


def _planned(job: Job) -> Answer:
    plan = prepared(job.asked())
    return Answer(
        device=plan.device,
        cells=tuple(CellName(c.op.name, c.implementation.name, c.dtype, c.spec) for c in plan.cells),
        required=plan.required,
        environment=environment(plan.device),
    )


def _judged(job: Job, name: CellName, share: int) -> Answer:
    plan = prepared(replace(job.asked(), op=(name.op,), impl=(name.spec,), dtype=(name.dtype,), require=()))
    if len(plan.cells) != 1:
        raise UsageError(f"impl={name.spec}: {len(plan.cells)} cells of {name.op} {name.dtype}: expected one")
    take_share(plan.device, share)
    cell = plan.cells[0]
    replays = {cell.key: Replay(tuple(map(parsed, job.replays)))} if job.replays else {}
    timeout = plan.timeout * patience(job.beside)
    sizes = sizes_required(job.asked().require, name.implementation)
    required = tuple(f"{EVERY_CELL}:{axis}={size}" for axis, size in sizes)
    plan = replace(plan, replays=replays, shard=job.shard, workers=job.beside, timeout=timeout, required=required)
    verdict = verdict_of(cell, plan, lambda cases, worst: None)
    return Answer(verdict=replace(verdict, implementation=name.implementation), environment=environment(plan.device))


if __name__ == "__main__":
    main()
