"""The engine that has the workers of a Dask cluster judge the cells: one of this machine, of Slurm, or an existing one.

The client makes the plan from names that a worker tells, shows what comes back, and decides: it needs neither a GPU nor
the files under test. What a worker runs for it is ``judges.judged``, with one line of text.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import dask
from distributed import Client, KilledWorker, LocalCluster

from normcheck.cases.case_line import parsed
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.cluster.judges import Judges, judged
from normcheck.cluster.lines import Answer, CellName, Job, answer_of, sent
from normcheck.errors import NormcheckError, UsageError, error_text, one_line, to_install
from normcheck.gate import replay
from normcheck.gate.engine import CellProgress, Order, judge_died
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan, configs_of, contexts_of, profile_of, shard_of
from normcheck.gate.sanity import sensible
from normcheck.gate.shards import SAME_VERSIONS
from normcheck.gate.tally import uncounted
from normcheck.gate.timings import timed
from normcheck.gate.workers import CORES_A_CELL, cores_here, fitting, free_bytes, visible_gpus
from normcheck.impls.implementation import Implementation
from normcheck.isolation.pool import in_turn
from normcheck.result import ELSEWHERE, JUDGE_DIED, Verdict
from normcheck.runner.device import device_there

GPU = "GPU"
"""The resource of a worker that has a GPU: how many cells it may judge side by side."""

_DASK = {
    "distributed.scheduler.allowed-failures": 1,  # the second worker that dies of a job is the last one
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
_LOOPBACK = "127.0.0.1:0"
_WITHIN = {  # this process only: whoever can talk to a scheduler can have it run code
    "processes": False,
    "dashboard_address": _LOOPBACK,  # a port is opened in any case, at which nothing is to be had
    "worker_dashboard_address": _LOOPBACK,
    "scheduler_kwargs": {"dashboard": False},
    "silence_logs": logging.CRITICAL,
}

_PATIENCE_SECONDS = 60.0  # without a worker that can judge
_LOOK_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_MANY = 10**6  # cells, before it is known how many there are


@contextmanager
def cluster_of(options: VerifyOptions) -> Iterator[Cluster]:
    """The engine that ``--scheduler`` names. At the end its judges are ended, whatever they do, and what was started
    for it. Raises UsageError.
    """
    name = f"normcheck-{uuid.uuid4().hex}"  # several runs may share a cluster
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_DASK))
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a worker that dies is told by its cell
        client, parts = _client(options, stack)
        client.register_plugin(Judges(name, parts))
        stack.callback(_forget, client, name)
        yield Cluster(client, name, waits=options.scheduler == "slurm")


def _forget(client: Client, name: str) -> None:
    with suppress(Exception):  # of a cluster that is gone
        client.unregister_worker_plugin(name)


def _client(options: VerifyOptions, stack: ExitStack) -> tuple[Client, dict[str, tuple[str, ...]]]:
    """A client of the cluster, and the arguments of the judges of each worker that was started here."""
    if options.scheduler == "local":
        workers, parts = _of_this_machine(options)
        cluster = LocalCluster(**workers, **_WITHIN)
        return stack.enter_context(Client(stack.enter_context(cluster))), parts
    if options.scheduler == "slurm":
        return stack.enter_context(Client(stack.enter_context(_slurm(options)))), {}
    try:
        return stack.enter_context(Client(options.scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)), {}
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"scheduler={options.scheduler}: expected a Dask scheduler there ({error_text(error, 200)})"
        ) from None


def _of_this_machine(options: VerifyOptions) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """A worker for each GPU, or for each group of cores: how to start them, and their judges' arguments."""
    cores = sorted(os.sched_getaffinity(0))
    if device_there(options.device) == "cuda":
        gpus = visible_gpus()
        cells = options.workers or fitting(_MANY, len(cores), free_bytes(), options.profile)
        gpus = gpus[: max(1, min(len(gpus), cells))]
        each = -(-cells // len(gpus))
        how: dict[str, Any] = {"n_workers": len(gpus), "threads_per_worker": each, "resources": {GPU: each}}
        parts: dict[str, tuple[str, ...]] = {str(number): ("--gpu", gpu) for number, gpu in enumerate(gpus)}
        return how, parts
    count = options.workers or max(1, cores_here() // CORES_A_CELL)
    groups = [cores[number * len(cores) // count : (number + 1) * len(cores) // count] for number in range(count)]
    parts = {str(n): ("--cores", ",".join(map(str, group))) for n, group in enumerate(groups) if group}
    return {"n_workers": count, "threads_per_worker": 1}, parts


def _slurm(options: VerifyOptions) -> Any:
    """A cluster of Slurm jobs, one for each of ``--workers``, as Dask's own configuration describes them."""
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError:
        raise UsageError(f"scheduler=slurm: expected dask-jobqueue; {to_install('cluster')}") from None
    try:
        cluster = SLURMCluster()
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"scheduler=slurm: expected jobqueue.slurm in Dask's configuration ({one_line(str(error), 300)})"
        ) from None
    cluster.scale(jobs=options.workers or 1)
    return cluster


class Cluster:
    """Engine: judges at the workers of ``client``, kept by the plugin ``name``. ``waits``: workers may come late."""

    def __init__(self, client: Client, name: str, *, waits: bool) -> None:
        self._client, self._name, self._waits = client, name, waits
        self._environment: Mapping[str, str] = {}
        self._first: dict[str, Verdict] = {}  # file -> the first verdict about it

    def planned(self, options: VerifyOptions) -> Plan:
        """The plan that ``options`` ask for, by the names that a worker tells. Raises UsageError."""
        self._wait_for_workers(options)
        device = "cuda" if options.device != "cpu" and self._slots("cuda") else "cpu"
        answer = self._answer_about_cells(options, device)
        self._environment = answer.environment
        profile = profile_of(options)
        plan = Plan(
            cells=tuple(map(_cell, answer.cells)),
            profile=profile,
            seed=options.seed,
            device=device,
            timeout=options.timeout,
            shard=shard_of(options.shard, profile),
            required=answer.required,
            judge=options.judge,
            contexts=contexts_of(options, device),
            asked=bool(options.context),
            held_to=options.require_context,
            configs=configs_of(options),
        )
        plan = timed(plan, options.timings) if options.timings else plan
        if not options.database:
            return plan
        return replace(plan, replays=replay.replays(options.database, plan.cells, parsed))

    def environment(self, device: str) -> Mapping[str, str]:
        """The machine of the worker that planned, and the versions of its libraries, which all others have as well."""
        return self._environment

    def verdicts(self, plan: Plan, options: VerifyOptions, progress: CellProgress) -> Iterator[tuple[int, Verdict]]:
        """(index, verdict) of every cell, each judged by the first worker that is free."""
        beside, waiting, cells = self._beside(plan.device), list[tuple[int, str]](), dict[str, Cell]()
        for index, cell in enumerate(plan.cells):
            if cell.key in plan.elsewhere:
                yield index, uncounted(cell, plan.device, "skip", detail=ELSEWHERE)
                continue
            line = _line_of(cell, plan, options, beside)
            cells[line] = cell
            waiting.append((index, line))
        order, running, alone_since = Order(plan), dict[Future[str], tuple[int, str]](), time.monotonic()
        executor, work = self._executor(plan.device), partial(judged, name=self._name)
        try:
            for done in in_turn(
                executor,
                lambda: max(1, sum(self._slots(plan.device).values())),
                work,
                waiting,
                running,
                lambda lines, begun: order.next([cells[line] for line in lines], [cells[line] for line in begun]),
                _LOOK_SECONDS,
            ):
                for future in done:
                    index, line = running.pop(future)
                    verdict = self._verdict(future, cells[line], plan)
                    order.add(verdict)
                    yield index, verdict
                if done or self._waits or self._slots(plan.device):
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > _PATIENCE_SECONDS:
                    break
            for index, line in (*running.values(), *waiting):
                detail = f"no worker of the cluster was there for {_PATIENCE_SECONDS:g} seconds"
                yield index, uncounted(cells[line], plan.device, "error", detail=detail)
        finally:
            for future in running:
                future.cancel()

    def _answer_about_cells(self, options: VerifyOptions, device: str) -> Answer:
        """Which cells ``options`` ask for, by a worker. Raises UsageError."""
        job = Job(options=sent(replace(options, device=device)), folder=os.getcwd())
        try:
            line = self._executor(device).submit(judged, job.line, self._name).result()
        except (KilledWorker, CancelledError) as error:
            raise NormcheckError(f"scheduler={options.scheduler}: no worker could plan ({error_text(error)})") from None
        answer = answer_of(line, "a judge's answer")
        if answer.usage:
            raise UsageError(answer.usage)
        if answer.failed:
            raise NormcheckError(answer.failed)
        return answer

    def _verdict(self, future: Future[str], cell: Cell, plan: Plan) -> Verdict:
        """The verdict that a worker has sent: what comes from another machine is checked as any report is."""
        try:
            answer = answer_of(future.result(), "a judge's answer")
        except KilledWorker:
            return judge_died(cell, plan)
        except CancelledError:
            return uncounted(cell, plan.device, "error", detail="the scheduler of the cluster was lost")
        except Exception as error:  # such as a worker on which normcheck is not installed
            return uncounted(cell, plan.device, "error", detail=error_text(error, 300))
        verdict = answer.verdict
        if verdict is None or answer.failed or answer.usage:
            if answer.failed == JUDGE_DIED:
                return judge_died(cell, plan)
            detail = answer.failed or answer.usage or "a worker sent no verdict"
            return uncounted(cell, plan.device, "error", detail=detail)
        trouble = self._trouble(verdict, answer.environment, cell, plan)
        return uncounted(cell, plan.device, "error", detail=trouble) if trouble else sensible(verdict)

    def _trouble(self, verdict: Verdict, its: Mapping[str, str], cell: Cell, plan: Plan) -> str:
        """Why a verdict cannot stand beside the others, "" if it can."""
        host = one_line(verdict.machine.get("host", "a worker"), 60)
        if verdict.key.on(verdict.device) != cell.key.on(plan.device):
            return f"{host} judged {one_line(str(verdict.key), 120)} on {verdict.device} instead"
        for name in SAME_VERSIONS:
            own, other = self._environment.get(name), its.get(name)
            if own != other:
                return f"{host} has {name}={one_line(str(other), 80)}: expected {one_line(str(own), 80)}, as the others"
        first = self._first.setdefault(verdict.file, verdict) if verdict.source else verdict
        if verdict.source != first.source:
            return (
                f"{one_line(verdict.file, 200)} is another one on {host} (sha256 {verdict.source[:12]}) than on "
                f"{one_line(first.machine.get('host', 'another'), 60)} ({first.source[:12]}): expected one version"
            )
        return ""

    def _wait_for_workers(self, options: VerifyOptions) -> None:
        """Wait for the first worker. Raises UsageError if there is none, or none with a GPU if that is asked for."""
        if self._waits:
            print("normcheck: waiting for the first of its jobs to start; Ctrl-C ends", file=sys.stderr)
        try:
            self._client.wait_for_workers(1, timeout=None if self._waits else _PATIENCE_SECONDS)
        except TimeoutError:
            raise UsageError(
                f"scheduler={options.scheduler}: no worker has come for {_PATIENCE_SECONDS:g} seconds; expected "
                f"'dask worker {options.scheduler}' on each machine, with normcheck installed"
            ) from None
        if options.device == "cuda" and not self._slots("cuda"):
            raise UsageError(
                f"scheduler={options.scheduler} device=cuda: no worker has the resource {GPU}; expected "
                f"'dask worker {options.scheduler} --nthreads 1 --resources {GPU}=1' for each GPU"
            )

    def _executor(self, device: str) -> Executor:
        needs = {"resources": {GPU: 1}} if device == "cuda" else {}
        executor: Executor = self._client.get_executor(pure=False, **needs)
        return executor

    def _slots(self, device: str) -> dict[str, int]:
        """Worker -> how many cells it judges side by side; on a GPU as many as its resource says."""
        workers = self._client.scheduler_info()["workers"]
        if device == "cpu":
            return {address: worker["nthreads"] for address, worker in workers.items()}
        found = {address: int(worker["resources"].get(GPU, 0)) for address, worker in workers.items()}
        return {address: min(slots, workers[address]["nthreads"]) for address, slots in found.items() if slots > 0}

    def _beside(self, device: str) -> int:
        """How many cells are judged side by side on the machine that has most."""
        workers = self._client.scheduler_info()["workers"]
        at_host = Counter[str]()
        for address, slots in self._slots(device).items():
            at_host[workers[address]["host"]] += slots
        return max(at_host.values(), default=1)


def _line_of(cell: Cell, plan: Plan, options: VerifyOptions, beside: int) -> str:
    replays = plan.replays[cell.key].cases if cell.key in plan.replays else ()
    return Job(
        options=sent(replace(options, device=plan.device)),
        folder=os.getcwd(),
        cell=CellName(cell.op.name, cell.implementation.name, cell.dtype, cell.spec),
        replays=tuple(map(str, replays)),
        shard=plan.shard,
        beside=beside,
    ).line


def _cell(name: CellName) -> Cell:
    """The cell of that name, whose kernel is elsewhere. Raises UsageError."""
    if name.op not in OPS or name.dtype not in DTYPES:
        raise UsageError(
            f"a judge named op={one_line(name.op, 60)} dtype={one_line(name.dtype, 60)}: expected known ones"
        )
    kernel = Implementation(name=name.implementation, op=name.op, forward=_never_called, source=name.spec)
    return Cell(OPS[name.op], kernel, name.dtype, name.spec)


def _never_called(*arguments: object, **options: object) -> Any:
    raise TypeError("this kernel is on another machine")
