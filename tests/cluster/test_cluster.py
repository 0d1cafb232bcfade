"""Cells judged by a cluster: what one machine says of them, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from normcheck.cluster.judge import answered
from normcheck.cluster.lines import Answer, CellName, Job, answer_of, job_of, sent
from normcheck.errors import UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES, Plan
from normcheck.result import JUDGE_DIED, Verdict
from tests.command_line import Cli, Done, KernelFile
from tests.hostile_text import HARM
from tests.sample_runs import verdict

RIGHT = """
import time, torch

def right(x, weight, bias=None, eps=1e-6):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""

WRONG = """
def rmsnorm(x, weight, bias=None, eps=1e-6):
    y = right(x, weight, bias, eps)
    return y * 1.01 if x.shape[-1] >= 8 else y
"""

SLOW = """
def rmsnorm(x, weight, bias=None, eps=1e-6):
    with open({began!r}, "a") as file:
        file.write(str(x.dtype) + "\\n")
    time.sleep({seconds})
    return right(x, weight, bias, eps)
"""
"""Tells that a case has begun, and takes its time."""

QUIET = {"dashboard_address": "127.0.0.1:0", "worker_dashboard_address": "127.0.0.1:0"}

ONE = ("--timeout", "60", "--op", "rmsnorm", "--device", "cpu", "--allow-thin")
"""Of few cases it is thin."""

FEW = (*ONE, "--max-examples", "4", "--time-budget", "1e-9", "--no-contexts")
"""The second of them is one that WRONG fails; in no second it becomes no simpler."""


def report() -> dict[str, Any]:
    return json.loads(Path("out.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def judges() -> list[psutil.Process]:
    """The judges that this process has started, or a process of its own."""
    return [p for p in psutil.Process().children(recursive=True) if "normcheck.cluster.judge" in _line(p)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(true: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def engine() -> ModuleType:
    """Imported by a test that uses it: every process of a run collects this file, and Dask takes most of a second."""
    return import_module("normcheck.cluster.engine")


@pytest.fixture
def slow_file(kernel_file: KernelFile, tmp_path: Path) -> Callable[[float], tuple[Path, Path]]:
    """A right kernel that writes its dtype to the second file in each call, where the sandbox lets nobody write."""

    def make(seconds: float) -> tuple[Path, Path]:
        began = tmp_path / "began"
        began.touch()
        return kernel_file(RIGHT, SLOW.format(began=str(began), seconds=seconds)), began

    return make


# --- A cluster of this machine


@pytest.mark.slow
def test_it_says_what_one_machine_says(cli: Cli, kernel_file: KernelFile) -> None:
    path = kernel_file(RIGHT, WRONG)
    argv = ("verify", "--impl", str(path), *FEW, "--dtype", "fp16", "--dtype", "fp32", "--report", "json:out.json")
    alone = cli(*argv)
    expected = report()
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(what_is_answered)
        done = cli(*argv, "--scheduler", "local", "--workers", "2")
        answers = looked.result()
    found = report()
    assert done.code == alone.code == 1
    assert [of(v) for v in found["verdicts"]] == [of(v) for v in expected["verdicts"]]
    assert found["messages"] == expected["messages"]
    same = found["environment"].keys() - {"device"}
    assert all(found["environment"][name] == expected["environment"][name] for name in same)
    for cell in found["verdicts"]:
        assert cell["machine"]["host"]
        assert len(cell["source"]) == 64
    assert not judges()
    # Who can talk to a scheduler runs code: this one can be talked to in its process only.
    assert all(address.startswith("127.0.0.1:") for address in answers)
    assert set(answers.values()) <= {b"HTTP/1.1 404"}


def what_is_answered() -> dict[str, bytes]:
    """What the addresses answer that this process and its judges listen at, once it has some."""
    until(judges)
    mine = psutil.Process().net_connections("inet") + [c for j in judges() for c in j.net_connections("inet")]
    found = {}
    for ip, port in {c.laddr for c in mine if c.status == psutil.CONN_LISTEN}:
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(b"GET /info/main/workers.html HTTP/1.0\r\n\r\n")
            found[f"{ip}:{port}"] = other.recv(12)
    return found


def of(cell: dict[str, Any]) -> dict[str, Any]:
    """What of a verdict does not hang on the time that cases take."""
    shown = ("op", "implementation", "dtype", "device", "status", "failed_at", "file", "line", "source", "machine")
    failure = cell["failure"] or {}
    return {name: cell[name] for name in shown} | {name: failure.get(name) for name in ("case", "message", "output")}


@pytest.mark.slow
def test_a_file_that_is_saved_gives_no_verdict_and_a_judge_that_dies_once_does(cli: Cli, slow_file: Any) -> None:
    """Two cells, one after another.

    Of the first some cases were of one version of the file, and the next cell is of another. The judge of the second is
    killed once, which changes no verdict. One that dies twice is below, with no torch in it.
    """
    path, began = slow_file(0.05)

    def disturb() -> None:
        until(lambda: "torch.float16" in called(began))
        path.write_text(path.read_text(encoding="utf-8") + "# saved\n", encoding="utf-8")
        _kill_a_judge(began, "torch.float32")

    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        every = ("--dtype", "fp32", "--scheduler", "local", "--workers", "1")
        done = cli(*of_a_slow_kernel(path), *every, "--report", "json:out.json")
        disturbed.result()
    assert done.code == 3, done.out
    saved, once = report()["verdicts"]
    assert saved["status"] == "error"
    assert "changed while it was judged: expected one version of it" in saved["detail"]
    assert (once["status"], once["cases"]) == ("thin", 4)


def of_a_slow_kernel(path: Path) -> tuple[str, ...]:
    """A run of four cases, which is long enough to be disturbed."""
    return ("verify", "--impl", str(path), *FEW, "--dtype", "fp16", "--no-sandbox")


def called(began: Path) -> list[str]:
    """The dtype of each call of a slow kernel until now."""
    return began.read_text(encoding="utf-8").splitlines()


def _kill_a_judge(began: Path, dtype: str) -> None:
    """Kill the judge once the kernel was called with this dtype."""
    until(lambda: dtype in called(began))
    (judge,) = judges()
    judge.kill()
    until(lambda: not judge.is_running() or judge.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(("deaths", "says"), [(0, "judged"), (1, "judged"), (2, JUDGE_DIED)])
def test_a_judge_that_dies_twice_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, says: str
) -> None:
    """With a program in a judge's place that dies in its first jobs, and then answers. All of them end."""
    program = tmp_path / "judge.py"
    program.write_text(DIES.format(path=str(tmp_path / "died"), deaths=deaths), encoding="utf-8")
    own, started = subprocess.Popen, list[subprocess.Popen[str]]()

    def other(argv: list[str], **how: Any) -> subprocess.Popen[str]:
        assert argv[1:3] == ["-m", "normcheck.cluster.judge"]
        started.append(own([argv[0], str(program)], **how))
        return started[-1]

    module = import_module("normcheck.cluster.judges")
    monkeypatch.setattr(module.subprocess, "Popen", other)
    plugin, worker = module.Judges("name", {}), SimpleNamespace(name="0", state=SimpleNamespace(nthreads=1))
    plugin.setup(worker)
    try:
        answer = answer_of(plugin.judged("a job"), "here")
    finally:
        plugin.teardown(worker)
    assert answer.failed == says
    assert len(started) == min(deaths + 1, 2)
    assert all(process.returncode is not None for process in started)


DIES = """
import os, sys
from pathlib import Path
died = Path({path!r})
for line in sys.stdin:
    count = int(died.read_text()) if died.exists() else 0
    if count < {deaths}:
        died.write_text(str(count + 1))
        os.abort()
    print('{{"failed": "judged"}}', flush=True)
"""


# --- An existing cluster


class Machines:
    """A scheduler and two workers, each a process, as somebody may have started them on other machines."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "scheduler.json"
        self._scheduler = self._started("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        until(self._is_described)
        self.address = json.loads(self._file.read_text(encoding="utf-8"))["address"]
        self.workers = [self.joined() for _ in range(2)]

    def _is_described(self) -> bool:
        """Whether the scheduler's file is there and whole: it is opened before it is written."""
        return self._file.exists() and self._file.read_text(encoding="utf-8").rstrip().endswith("}")

    def joined(self) -> subprocess.Popen[bytes]:
        return self._started("worker", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0")

    def _started(self, *argv: str) -> subprocess.Popen[bytes]:
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self._file.parent}
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_" + argv[0], "--scheduler-file", str(self._file), *argv[1:]],
            **how,  # type: ignore[call-overload]
        )

    def end(self) -> None:
        for process in (*self.workers, self._scheduler):
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.end()


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_changes_no_verdict(cli: Cli, slow_file: Any, machines: Machines) -> None:
    path, began = slow_file(0.05)
    dead: list[int] = []

    def kill() -> None:
        until(lambda: began.stat().st_size)
        time.sleep(0.3)
        busy = [
            w for w in machines.workers if any("cluster.judge" in _line(p) for p in psutil.Process(w.pid).children())
        ]
        kernels = psutil.Process(busy[0].pid).children(recursive=True)
        busy[0].kill()
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in kernels))
        dead.append(busy[0].pid)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        argv = ("--scheduler", machines.address, "--allow-thin", "--report", "json:out.json")
        done = cli(*of_a_slow_kernel(path), "--dtype", "fp32", *argv)
        killed.result()
    assert dead  # with all that it had started
    assert done.code == 0, done.out + done.err
    assert [(v["status"], v["cases"]) for v in report()["verdicts"]] == [("thin", 4)] * 2
    for process in machines.workers:  # nothing of this run stays at the other worker
        if process.pid not in dead:
            until(lambda p=process: not psutil.Process(p.pid).children())  # type: ignore[misc]


@pytest.mark.slow
def test_who_is_not_there(cli: Cli, monkeypatch: pytest.MonkeyPatch, engine: ModuleType) -> None:
    monkeypatch.setattr(engine, "_CONNECT_SECONDS", 0.5)
    done = cli("verify", "--impl", "torch", "--scheduler", "tcp://127.0.0.1:9")
    assert (done.code, done.out) == (2, "")
    assert "scheduler=tcp://127.0.0.1:9: expected a Dask scheduler there" in done.err


@pytest.mark.slow
def test_a_cluster_without_a_gpu_or_without_a_worker(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, engine: ModuleType
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE_SECONDS", 0.5)
    one = ("verify", "--impl", "torch", "--scheduler")
    with engine.LocalCluster(n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", **QUIET) as cluster:
        done = cli(*one, cluster.scheduler_address)
        assert (done.code, "no worker has come for 0.5 seconds" in done.err) == (2, True)
        cluster.scale(1)
        done = cli(*one, cluster.scheduler_address, "--device", "cuda")
        assert (done.code, "no worker has the resource GPU" in done.err) == (2, True)


# --- Slurm


@pytest.mark.slow
def test_jobs_of_slurm(
    cli: Cli, kernel_file: KernelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ModuleType
) -> None:
    """With commands in the place of Slurm's, that run a copy of a job's script at once."""
    commands = tmp_path / "bin"
    commands.mkdir()
    jobs = tmp_path / "jobs"
    for name, text in (
        (
            "sbatch",
            f'cp "$1" {tmp_path}/job\nsetsid bash {tmp_path}/job >/dev/null 2>&1 </dev/null &\n'
            f'echo $! >> {jobs}\necho "Submitted batch job $!"\n',
        ),
        ("scancel", 'kill -- "-$1"\n'),
    ):
        (commands / name).write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    argv = (
        "verify",
        "--impl",
        str(kernel_file(RIGHT, WRONG)),
        *FEW,
        "--dtype",
        "fp16",
        "--scheduler",
        "slurm",
    )
    done = cli(*argv)
    assert (done.code, "expected jobqueue.slurm in Dask's configuration" in done.err) == (2, True)
    config = {"cores": 1, "memory": "2GB", "interface": "lo", "walltime": "00:10:00"}
    with engine.dask.config.set({f"jobqueue.slurm.{name.replace('_', '-')}": value for name, value in config.items()}):
        done = cli(*argv, "--report", "json:out.json")
    assert (done.code, report()["verdicts"][0]["status"]) == (1, "fail")
    (job,) = map(int, jobs.read_text(encoding="utf-8").split())
    until(lambda: not psutil.pid_exists(job) or psutil.Process(job).status() == psutil.STATUS_ZOMBIE)


# --- Ctrl-C


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_reports(slow_file: Any, tmp_path: Path) -> None:
    path, began = slow_file(0.2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores, as would the run
    local = ("--scheduler", "local", "--workers", "1")
    argv = (*of_a_slow_kernel(path), *local, "--report", f"json:{tmp_path / 'out.json'}")
    run = subprocess.Popen(
        [sys.executable, "-m", "normcheck", *argv], stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True
    )
    until(lambda: began.stat().st_size)
    started = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["complete"], found["exit_code"], found["verdicts"]) == (False, 130, [])
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in started))


# --- Lines


def test_a_job_and_an_answer_are_lines() -> None:
    options = VerifyOptions(impl=("torch",), dtype=("fp16",), seed=-(10**30), time_budget=0.5, report=("json:-",))
    job = Job(options=sent(options), folder="/", cell=CellName("rmsnorm", "".join(HARM), "fp16", "a.py"), shard=(2, 3))
    assert "\n" not in job.line
    assert job.line.isascii()
    assert job_of(job.line) == replace(job, options=json.loads(job.line)["options"])
    assert job_of(job.line).asked() == replace(options, report=())
    answer = Answer(verdict=verdict(detail="".join(HARM), worst={}), environment={"torch": "2"})
    assert answer_of(answer.line, "host") == answer


@pytest.mark.parametrize("line", ["", "nonsense", "[]", '{"options": 1}', '{"options": {}, "folder": 1}', "[" * 10**5])
def test_a_line_that_is_no_job(line: str) -> None:
    found = answered(line, 1, lambda: "")
    assert found.usage.startswith("job")
    assert found.verdict is None


def test_what_a_judge_answers_if_it_cannot_judge(tmp_path: Path) -> None:
    job = Job(options=sent(VerifyOptions(impl=("torch",))), folder=str(tmp_path / "absent"))
    assert "has no folder" in answered(job.line, 1, lambda: "").usage
    other = replace(job, folder=str(tmp_path), options={"dtype": ["fp8"]})
    assert "fp8" in answered(other.line, 1, lambda: "").usage
    known = Job(options=sent(VerifyOptions(impl=("torch",), op=("rmsnorm",), device="cpu")), folder=str(tmp_path))
    found = answered(known.line, 1, lambda: "")
    assert [cell.dtype for cell in found.cells] == ["fp16", "bf16", "fp32"]
    assert answered(known.line, 1, lambda: "normcheck/x.py changed").failed == "normcheck/x.py changed"


# --- What comes back is data from somebody else


PLAN = Plan((), PROFILES["quick"], 0, "cpu", 60.0)


def judged_as(engine: ModuleType, *answers: str) -> list[Verdict]:
    """The verdicts that a client makes of what workers answer about one cell."""
    cluster = engine.Cluster(None, "", waits=False)  # type: ignore[arg-type]
    cluster._environment = {"torch": "2.13"}
    cell = engine._cell(CellName("rmsnorm", "mine", "fp16", "mine.py"))
    found = []
    for answer in answers:
        future = engine.Future()
        future.set_result(answer)
        found.append(cluster._verdict(future, cell, PLAN))
    return found


def right(**changes: Any) -> str:
    own = {"op": "rmsnorm", "implementation": "mine", "dtype": "fp16", "device": "cpu", "file": "mine.py"}
    known = verdict(**{**own, "source": "a" * 64, "machine": {"host": "one"}, **changes})
    return Answer(verdict=known, environment={"torch": changes.pop("torch", "2.13")}).line


def test_only_what_fits_the_cell_is_taken(engine: ModuleType) -> None:
    for answer, word in (
        ("rubbish", "expected a line of JSON"),
        ("".join(HARM), "expected a line of JSON"),
        ("{}", "a worker sent no verdict"),
        (right(dtype="fp32"), "instead"),
        (right(device="cuda"), "instead"),
        (Answer(failed=JUDGE_DIED).line, JUDGE_DIED),
        (Answer(usage="impl=x: expected y").line, "impl=x: expected y"),
    ):
        (found,) = judged_as(engine, answer)
        assert (found.status, found.failure) == ("error", None)
        assert word in found.detail
        assert (found.op, found.implementation, found.dtype, found.device) == ("rmsnorm", "mine", "fp16", "cpu")
    assert judged_as(engine, right())[0].status == "pass"


def test_versions_and_files_are_never_mixed(engine: ModuleType) -> None:
    other = Answer(verdict=answer_of(right(), "").verdict, environment={"torch": "2.11"}).line
    (found,) = judged_as(engine, other)
    assert (found.status, found.detail) == ("error", "one has torch=2.11: expected 2.13, as the others")
    first, second = judged_as(engine, right(), right(source="b" * 64, machine={"host": "two"}))
    assert (first.status, second.status) == ("pass", "error")
    assert second.detail.startswith("mine.py is another one on two (sha256 bbbbbbbbbbbb) than on one (aaaaaaaaaaaa)")


def test_options_that_do_not_go_with_a_cluster(cli: Cli) -> None:
    for more, word in (
        (("--no-isolation",), "expected no --no-isolation"),
        (("--watch",), "expected no --watch"),
        (("--scheduler", "mpi"), "expected local, slurm, tcp://HOST:PORT"),
    ):
        done: Done = cli("verify", "--impl", "torch", "--scheduler", "local", *more)
        assert (done.code, word in done.err) == (2, True), done.err


def test_a_cell_that_no_worker_is_there_for(monkeypatch: pytest.MonkeyPatch, engine: ModuleType) -> None:
    """Its task waits for a worker; the run does not, for ever."""
    monkeypatch.setattr(engine, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.1)
    cell = engine._cell(CellName("rmsnorm", "mine", "fp16", "mine.py"))
    with engine.LocalCluster(n_workers=0, processes=False, **QUIET) as local, engine.Client(local) as client:
        cluster = engine.Cluster(client, "", waits=False)
        ((index, found),) = cluster.verdicts(replace(PLAN, cells=(cell,)), VerifyOptions(), lambda *_: None)
    assert (index, found.status, found.detail) == (0, "error", "no worker of the cluster was there for 0.3 seconds")


def test_names_of_no_op(engine: ModuleType) -> None:
    with pytest.raises(UsageError, match="a judge named op=softmax"):
        engine._cell(CellName("softmax", "x", "fp16", "x.py"))


def test_threads_are_gone() -> None:
    """A LocalCluster's loops end with it; whoever judges next in this process has it to himself."""
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("TCP-Executor")], 20.0)
