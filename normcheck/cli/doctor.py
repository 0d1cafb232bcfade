"""Command ``normcheck doctor``: machine and versions, what runs here, and what to do about what does not.

torch, too, is imported inside a check, so that its failure is a line of the report.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

import typer

from normcheck import __version__
from normcheck.cases.ops import OPS
from normcheck.cli.remedies import step_for
from normcheck.errors import error_text, one_line
from normcheck.runner import nvidia_driver

if TYPE_CHECKING:
    from normcheck.impls.implementation import Implementation

CASE = "rmsnorm fp32 M=3 N=9 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0"
"""Case that is run to see whether anything can be verified."""

_TIMEOUT_SECONDS = 60.0
_NAME_COLUMNS = 20
_IMPORTS = "python -c 'import numpy, torch, triton'"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line of the report; ``step``: what to do about it, "" if nothing is to be done."""

    name: str
    value: str
    step: str = ""


def examine(stream: TextIO, interpret: str = "") -> int:
    """Write each fact to ``stream`` as soon as it is known; returns 0 if something can be verified here, else 5.

    ``interpret``: TRITON_INTERPRET as the user set it, before normcheck sets it on a CPU.
    """
    _put(stream, "machine", machine())
    _put(stream, "versions", versions())
    _put(stream, "GPU", gpu())
    device, trouble = _device()
    _put(stream, "Triton", interpretation(interpret, device, trouble))
    runs = False if trouble else _put_what_runs(stream, device)
    if runs:
        stream.write("\nThis machine can verify. Next: normcheck verify\n")
        return 0
    stream.write("\nNothing can be verified here. Next: what stands behind the first arrow (->) above\n")
    return 5


def _put_what_runs(stream: TextIO, device: str) -> bool:
    """Write whether a case can be judged, in a process of its own or in this one, and which implementations run.

    Returns whether anything can be verified.
    """
    apart = _checked("isolation", lambda: _works(device, isolation=True), "run with --no-isolation")
    _put(stream, "isolation", [apart])
    good = not apart.step
    if good:
        _put(stream, "sandbox", sandbox())
    else:
        here = _checked("in this process", lambda: _works(device, isolation=False), "report it, with all of the above")
        _put(stream, "without it", [here])
        good = not here.step
    return _put_implementations(stream, device) and good


def _put(stream: TextIO, title: str, facts: list[Fact]) -> None:
    stream.write(f"{title}\n")
    for fact in facts:
        stream.write(f"  {fact.name:<{_NAME_COLUMNS}} {one_line(fact.value, 400)}\n")
        if fact.step:
            stream.write(f"  {'':<{_NAME_COLUMNS}} -> {one_line(fact.step, 400)}\n")
    stream.flush()


def _checked(name: str, check: Callable[[], Fact | str], step: str = "") -> Fact:
    """What ``check`` found; if it failed, its error and the ``step``: one failing check does not end the others."""
    try:
        found = check()
    except Exception as error:
        return Fact(name=name, value=f"does not work: {error_text(error, 300)}", step=step)
    return found if isinstance(found, Fact) else Fact(name=name, value=found)


def machine() -> list[Fact]:
    """System, processor and memory."""
    return [
        _checked("system", platform.platform),
        _checked("processor", _processor),
        _checked("memory", _memory),
    ]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"


def _memory() -> str:
    from psutil import virtual_memory

    machine = virtual_memory()
    free, there = machine.free / 2**30, machine.total / 2**30
    shared = shutil.disk_usage("/dev/shm").free / 2**30
    return f"{there:.1f} GiB, {free:.1f} GiB of it unused; {shared:.1f} GiB of shared memory free"


def versions() -> list[Fact]:
    """Versions of what normcheck runs on and of what it verifies."""
    packages = ("triton", "numpy", "hypothesis", "safetensors", "liger-kernel")
    return [
        Fact(name="normcheck", value=__version__),
        Fact(name="python", value=f"{platform.python_version()}, {platform.python_implementation()}"),
        _checked("torch", _torch, f"make this work first: {_IMPORTS}"),
        *(_checked(name, lambda name=name: _installed(name)) for name in packages),  # type: ignore[misc]
        _checked("cudnn frontend", lambda: _installed("nvidia-cudnn-frontend")),
        _checked("cudnn backend", _backend),
        _checked("C++ compiler", _compiler),
    ]


def _torch() -> str:
    torch: Any = import_module("torch")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {built}"


def _installed(distribution: str) -> Fact:
    name = distribution.replace("nvidia-cudnn-frontend", "cudnn frontend")
    try:
        return Fact(name=name, value=version(distribution))
    except PackageNotFoundError:
        optional = distribution in ("liger-kernel", "nvidia-cudnn-frontend")
        step = "" if optional else f"pip install {distribution}"
        return Fact(name=name, value="not installed" + (", needed on a GPU only" if optional else ""), step=step)


def _backend() -> str:
    """Versions of the cuDNN that torch loads and of the one that the frontend loads; they should be the same."""
    from normcheck.impls._cudnn_graphs import version_text

    own = import_module("torch").backends.cudnn.version()
    found = [f"{version_text(own)} by torch"] if own else []
    try:
        found.append(f"{version_text(import_module('cudnn').backend_version())} by its frontend")
    except Exception as error:  # no frontend, or one that finds no library
        found.append(f"none by its frontend ({one_line(error_text(error), 120)})")
    return ", ".join(found)


def _compiler() -> Fact:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        step = "install g++, or set CXX: torch_compile needs one on a CPU, and Triton a C compiler on a GPU"
        return Fact(name="C++ compiler", value=f"{name} is not there", step=step)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return Fact(name="C++ compiler", value=f"{path}: {next(iter(done.stdout.splitlines()), 'says nothing of itself')}")


def gpu() -> list[Fact]:
    """GPUs that the driver reports, and those that torch sees."""
    return [_checked("driver", _driver), _checked("seen by torch", _seen)]


def _driver() -> str:
    if not nvidia_driver.present():
        return "no NVIDIA driver"
    own = nvidia_driver.version() or "of a version that it does not tell"
    return f"{own}, with {', '.join(nvidia_driver.gpus()) or 'no GPU'}"


def _seen() -> Fact:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return Fact(name="seen by torch", value="no GPU", step=_why_unseen(torch))
    every = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, there = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        capability = f"compute capability {properties.major}.{properties.minor}"
        every.append(f"{number}: {properties.name}, {capability}, {free:.1f} of {there:.1f} GiB free")
    return Fact(name="seen by torch", value="; ".join(every))


def _why_unseen(torch: Any) -> str:
    """What to do if there is a driver and torch does not see its GPUs; "" if there is none."""
    if not nvidia_driver.present():
        return ""
    if not torch.version.cuda:
        return "install a build of torch for CUDA: this one has none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} hides GPUs: unset it"
    return f"update the driver, or install a torch built for an older CUDA than {torch.version.cuda}"


def _device() -> tuple[str, str]:
    """The device on which normcheck would run, prepared for it, and what went wrong with that, or ""."""
    try:
        from normcheck.runner.device import device_for

        return device_for("auto"), ""
    except Exception as error:
        return "cpu", error_text(error, 400)


def interpretation(given: str, device: str, trouble: str) -> list[Fact]:
    """How Triton kernels run on ``device``. ``given``: TRITON_INTERPRET; ``trouble``: why normcheck cannot start."""
    shown = f"TRITON_INTERPRET={given}" if given else "TRITON_INTERPRET is not set"
    if trouble:
        step = f"make this work first: {_IMPORTS}"
        return [Fact(name="kernels", value=f"{shown}; normcheck cannot start: {trouble}", step=step)]
    if device == "cpu":
        return [Fact(name="kernels", value=f"{shown}: interpreted on the CPU, which normcheck sees to")]
    if given.lower() in ("1", "true", "yes", "on", "y"):
        return [Fact(name="kernels", value=f"{shown}: interpreted in spite of the GPU", step="unset TRITON_INTERPRET")]
    return [Fact(name="kernels", value=f"{shown}: compiled for the GPU")]


def _works(device: str, *, isolation: bool) -> Fact:
    """Whether a case can be run and judged in a process of its own, or without ``isolation`` in this one."""
    from normcheck.cases.case_line import parsed
    from normcheck.checks.attempt import run_case
    from normcheck.checks.cell import Cell
    from normcheck.gate.plan import PROFILES, Plan
    from normcheck.gate.prepare import selected
    from normcheck.runner.session import session_of

    name = "isolation" if isolation else "in this process"
    case, begun = parsed(CASE), time.perf_counter()
    (implementation,) = selected("torch", (case.op,), device, _TIMEOUT_SECONDS, isolation=isolation)
    cell = Cell(OPS[case.op], implementation, case.dtype, "torch")
    with session_of(implementation):
        result = run_case(cell, case, Plan((cell,), PROFILES["quick"], 0, device, _TIMEOUT_SECONDS))
    took = f"{time.perf_counter() - begun:.1f} s on {device}"
    if result.failed or not result.checked:
        what = result.refused or "; ".join(p.message for p in result.problems) or "torch's own rmsnorm is found wrong"
        where = "run with --no-isolation" if isolation else "run it with --device cpu"
        return Fact(name=name, value=f"does not work: {what}", step=f"{where}: normcheck repro torch '{CASE}'")
    where = "a worker was started, and torch's rmsnorm judged" if isolation else "torch's rmsnorm was judged"
    return Fact(name=name, value=f"works: {where}, in {took}")


_NO_LANDLOCK = "run it in a container, or on Linux 5.13 or later with Landlock switched on"
_HELD = (
    ("files", "a kernel writes only to a folder of its own", "a kernel can change your files", _NO_LANDLOCK),
    (
        "memory",
        "a kernel cannot open the memory of the judge",
        "a kernel can write to the judge's memory",
        _NO_LANDLOCK,
    ),
    (
        "signals",
        "a kernel cannot signal the judge",
        "a kernel can kill the judge, which shows: the run has no verdict then",
        "",
    ),
    (
        "limits",
        "a kernel cannot change the judge's limits",
        "a kernel can change the judge's limits, which ends it",
        "",
    ),
    (
        "services",
        "a kernel cannot ask the services of this machine",
        "a kernel can ask a service, such as a container's, to do what it may not",
        "",
    ),
    ("rights", "a kernel has no right of root", "a kernel has rights of root", "run it as a user, not as root"),
    ("programs", "a kernel starts no program with more rights", "a kernel can start sudo and the like", _NO_LANDLOCK),
    ("spaces", "a kernel makes no namespace in which it is root", "a kernel can be root in a namespace of its own", ""),
)
"""What the sandbox should hold: field of ``sandbox.Reach``, if it does, if it does not, and what to do then."""


def sandbox() -> list[Fact]:
    """What of the sandbox holds here, as a worker finds by trying."""
    try:
        from normcheck.isolation.select import reach

        with NamedTemporaryFile(prefix="normcheck-doctor-") as file:
            found = reach(file.name)
    except Exception as error:
        step = "run it with --no-sandbox, if you trust the kernel"
        return [Fact(name="worker", value=f"does not work: {error_text(error, 300)}", step=step)]
    return [
        Fact(name=name, value=f"not held: {loose}", step=step) if getattr(found, name) else Fact(name=name, value=held)
        for name, held, loose, step in _HELD
    ]


def _put_implementations(stream: TextIO, device: str) -> bool:
    """Write which implementations run. Returns whether any does."""
    stream.write(f"implementations, on {device}\n")
    runs = False
    for name, state, step in _states(device):
        runs |= not step
        stream.write(f"  {one_line(name, 60):<{_NAME_COLUMNS}} {one_line(state, 400)}\n")
        if step:
            stream.write(f"  {'':<{_NAME_COLUMNS}} -> {one_line(step, 400)}\n")
    return runs


def _states(device: str) -> Iterator[tuple[str, str, str]]:
    """(name, state, step) of every known implementation; its ops with the same state are together."""
    from normcheck.impls import discovery

    for name, found in discovery.implementations().items():
        states: dict[tuple[str, str], list[str]] = {}
        for implementation in found:
            states.setdefault(_state(implementation, device), []).append(implementation.op)
        for (state, step), ops in states.items():
            yield name, f"{', '.join(ops)}: {state}", step


def _state(implementation: Implementation, device: str) -> tuple[str, str]:
    """(state, step): whether it runs, else why not and what to do."""
    try:
        from normcheck.runner.call import unavailable  # imports torch

        reason = unavailable(implementation, device)
    except Exception as error:
        return error_text(error, 300), f"install what it is made of: {implementation.source}"
    if reason:
        return reason, step_for(reason, implementation.source)
    return ("runs" if device in implementation.by_default else f"runs with --impl {implementation.name}"), ""


def doctor() -> None:
    """Machine, drivers and versions; what runs here, and what does not, why, and what to do about it.

    Exit code: 0 something can be verified here; 5 nothing can.
    """
    raise typer.Exit(examine(sys.stdout, os.environ.get("TRITON_INTERPRET", "")))
