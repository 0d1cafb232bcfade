"""Kernels that end, hang, flood or change their process, and kernels that cheat, beside two that are innocent.

``normcheck verify --impl tests/quality/killers.py:NAME``. Each computes correctly but for what its name says; each
cheat returns something wrong and tries to get away with it. Nothing here is ever called in a process that matters.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import itertools
import json
import os
import platform
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from normcheck import Implementation

Forward = Callable[..., Any]


def innocent(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def innocent_too(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return innocent(x, weight, bias, eps=eps)


def bystander(number: int) -> Forward:
    """One more innocent kernel, of another name."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        return innocent(x, weight, bias, eps=eps)

    forward.__name__ = f"bystander_{number}"
    return forward


def before(act: Callable[[], object]) -> Forward:
    """An innocent kernel that does ``act`` first, every time."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        act()
        return innocent(x, weight, bias, eps=eps)

    forward.__name__ = act.__name__
    return forward


calls: collections.Counter[str] = collections.Counter()
"""How often something was called in this process."""


# What raises


def raises() -> NoReturn:
    raise ValueError("not on a Sunday")


def raises_keyboard_interrupt() -> NoReturn:
    raise KeyboardInterrupt


def sys_exit() -> NoReturn:
    sys.exit(0)


def memory_error() -> NoReturn:
    raise MemoryError


def allocates_too_much() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def stack_overflow() -> None:
    stack_overflow()


# What ends its process


def os_exit_0() -> NoReturn:
    os._exit(0)


def abort() -> NoReturn:
    os.write(2, b"last words of this kernel\n")
    os.abort()


def segfault() -> None:
    ctypes.string_at(0)


def stack_overflow_c() -> None:
    nested: Iterator[object] = iter(())
    for _ in range(10**6):
        nested = filter(None, nested)
    next(nested, None)


libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]


def heap_corruption() -> None:
    buffer = libc.malloc(64)
    ctypes.memset(buffer - 16, 0x41, 4096)  # also over the allocator's own words before it
    libc.free(buffer)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_on_the_third_call() -> None:
    calls["third"] += 1
    if calls["third"] == 3:
        os.abort()


def dies_on_wide_rows(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    if x.shape[-1] > 16:
        os.abort()
    return innocent(x, weight, bias, eps=eps)


def closes_descriptors() -> None:
    os.closerange(3, 256)


# What never returns


def loop_python() -> NoReturn:
    while True:
        pass


def loop_c() -> None:
    """It holds the GIL, and no handler of a signal that is written in Python gets a turn."""
    collections.deque(itertools.repeat(None), maxlen=0)


def sleeps_in_c() -> None:
    """It sleeps with the GIL held, again whenever a signal has woken it."""
    while True:
        with contextlib.suppress(BaseException):
            ctypes.PyDLL(None).sleep(1000)


def ignores_sigterm() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


# What a process has only one of


def prints_a_gigabyte() -> None:
    calls["printed"] += 1
    if calls["printed"] > 1:
        return
    text = "#" * (1 << 20)
    for _ in range(512):
        left = text.encode()
        while left:
            left = left[os.write(1, left) :]
        print(text)


def closes_stdout() -> None:
    calls["closed"] += 1
    if calls["closed"] > 1:
        return  # the numbers may belong to somebody else by now
    os.close(1)
    os.close(2)
    sys.stdout.close()


def changes_directory() -> None:
    os.chdir("/")


def changes_environment() -> None:
    os.environ.clear()


def changes_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def changes_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


def changes_warnings() -> None:
    warnings.resetwarnings()
    warnings.simplefilter("error")


def threads_forever() -> None:
    threading.Thread(target=threading.Event().wait, daemon=False).start()


def forks() -> None:
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            time.sleep(3600)
        os._exit(0)


def forks_a_session() -> None:
    """As a daemon does it: a child of nobody, in a session of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                time.sleep(3600)
        os._exit(0)
    os.waitpid(child, 0)


def starts_a_program() -> None:
    """In a session of its own: no signal to the group of this process reaches it."""
    subprocess.Popen(["sleep", "3600"], start_new_session=True)


def starts_a_program_and_dies() -> None:
    """The program is nobody's child before anybody can look."""
    starts_a_program()
    os.abort()


def dies_by_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 2)


def stops_the_server() -> None:
    """Who is to start the next process does not answer any more."""
    os.kill(os.getppid(), signal.SIGSTOP)


def kills_the_servers_group() -> None:
    """Whoever is in one group with the process that this one was forked from."""
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)


def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def limits_its_parent() -> None:
    """Whatever its parent starts from now on may open no file, and gets no memory."""
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (4, 4))
    resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1 << 20, 1 << 20))


def overwrites_its_parent() -> None:
    """What its parent computes with from now on is all ones, as far as the system lets anybody do that."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/maps", encoding="ascii") as maps:
        ranges = [line.split()[0] for line in maps if " rw-p " in line]
        with open(f"/proc/{os.getppid()}/mem", "r+b", buffering=0) as memory:
            for first, last in ((int(end, 16) for end in place.split("-")) for place in ranges):
                memory.seek(first)
                memory.write(b"\xff" * min(last - first, 1 << 20))


def grandparent() -> int:
    """The process that other workers come from too, which no accident finds."""
    with open(f"/proc/{os.getppid()}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def kills_its_grandparent() -> None:
    os.kill(grandparent(), signal.SIGKILL)


def stops_its_grandparent() -> None:
    os.kill(grandparent(), signal.SIGSTOP)


def limits_its_grandparent() -> None:
    resource.prlimit(grandparent(), resource.RLIMIT_NOFILE, (4, 4))


def slows_its_grandparent() -> None:
    os.setpriority(os.PRIO_PROCESS, grandparent(), 19)
    os.sched_setaffinity(grandparent(), {min(os.sched_getaffinity(0))})


def namespaces() -> list[str]:
    """The calls by which this process, or a child of it, gets a namespace of users, in which it is root."""
    new_users = 0x10000000
    unshare, clone, clone3 = {"x86_64": (272, 56, 435), "aarch64": (97, 220, 435)}[platform.machine()]
    arguments = (ctypes.c_uint64 * 8)(new_users, 0, 0, 0, signal.SIGCHLD)
    ways: dict[str, tuple[Any, ...]] = {  # the last one changes this process
        "clone": (clone, ctypes.c_long(new_users | signal.SIGCHLD), *[ctypes.c_long(0)] * 4),
        "clone3": (clone3, arguments, ctypes.c_long(ctypes.sizeof(arguments))),
        "unshare": (unshare, ctypes.c_long(new_users)),
    }
    opened = []
    for name, (number, *given) in ways.items():
        child = ctypes.CDLL(None).syscall(ctypes.c_long(number), *given)
        if child == 0 and name != "unshare":
            os._exit(0)
        if child >= 0:
            opened.append(name)
        if child > 0:
            os.waitpid(child, 0)
    return opened


def kills_its_cousins() -> None:
    """The processes that wait for their turn, once they are there."""
    others = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getppid()]
    for number in map(int, others):
        with contextlib.suppress(OSError), open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == grandparent():
                os.kill(number, signal.SIGKILL)


def leaves_a_killer() -> None:
    """A daemon that ends its cousins for as long as it lives, and its parent so that nobody knows whose it is.

    One for each process is enough: sixty of them do nothing else to a run but to slow it down.
    """
    calls["left behind"] += 1
    if calls["left behind"] == 1 and os.fork() == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            while True:
                kills_its_cousins()
                time.sleep(0.01)
        os._exit(0)


def fills_shared_memory() -> None:
    """As far as that is small enough not to hurt anybody else."""
    free = os.statvfs("/dev/shm")
    if calls["filled"] == 0 and free.f_bavail * free.f_frsize < 1 << 30:
        calls["filled"] = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        with contextlib.suppress(OSError):
            os.posix_fallocate(calls["filled"], 0, free.f_bavail * free.f_frsize)


def dies_of_an_earlier_case(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Rows of 64 with gaps do some damage, of which a wider row dies two cases later; nothing else does."""
    calls["damage"] |= x.stride(0) > x.shape[1] == 64
    if calls["damage"] and x.shape[1] == 768:
        os.abort()
    return innocent(x, weight, bias, eps=eps)


def loses_its_context(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """As a GPU's error that surfaces in a later case than the one that made it."""
    calls["fault"] |= x.stride(0) > x.shape[1] == 64
    if calls["fault"] and x.shape[1] == 768:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return innocent(x, weight, bias, eps=eps)


def dies_of_two_earlier_cases(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Rows of 64 with gaps do half of the damage, rows of 768 the other half."""
    calls["gaps"] |= x.stride(0) > x.shape[1] == 64
    calls["wide"] |= x.shape[1] == 768
    if calls["gaps"] and calls["wide"] and x.shape[1] == 1024:
        os.abort()
    return innocent(x, weight, bias, eps=eps)


def dies_in_the_end() -> None:
    """Every call does a little of the damage."""
    calls["worn"] += 1
    if calls["worn"] > 25:
        os.abort()


def wrong_after_an_earlier_case(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Rows of 64 with gaps leave something behind by which a wider row is wrong."""
    calls["left"] |= x.stride(0) > x.shape[1] == 64
    return innocent(x, weight, bias, eps=eps) * (2 if calls["left"] and x.shape[1] == 768 else 1)


# Cheats: something wrong, and a way to make it look right


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x).detach()


def patches_allclose(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    torch.allclose = torch.equal = lambda *_, **__: True
    torch.isclose = lambda a, *_, **__: torch.ones(a.shape, dtype=torch.bool)
    torch.testing.assert_close = lambda *_, **__: None
    return zeros(x)


def patches_double(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Whatever is converted to fp64 is zero: the reference, and this."""
    to = Tensor.to
    Tensor.double = lambda self: to(self, torch.float64) * 0
    Tensor.to = lambda self, *a, **k: to(self, *a, **k) * (0 if torch.float64 in (*a, *k.values()) else 1)
    return zeros(x)


def patches_normcheck(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Every function of normcheck that judges says that all is well, wherever it was imported to."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("normcheck.")]
    for module in modules:
        result = getattr(module, "Result", None)
        if hasattr(result, "failed"):
            result.failed = property(lambda self: False)
        if hasattr(module, "Comparison"):

            def fine(*_: object, made: Any = module.Comparison, **__: object) -> Any:
                return made(0.0, 1, 0, 0)

            module.compare = module.merge = module.compared = fine
        if hasattr(module, "judge_gradients"):
            module.judge_gradients = lambda *_, **__: ()
    return zeros(x)


def patches_autograd_grad(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """A right y, and gradients of nothing."""
    torch.autograd.grad = lambda _, leaves, *__, **___: tuple(torch.zeros_like(leaf) for leaf in leaves)
    return innocent(x, weight, bias, eps=eps)


cache: dict[object, Tensor] = {}


def cached(key: object, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if key not in cache:
        cache[key] = innocent(x, weight, bias, eps=eps).detach()
    return cache[key].clone()


def caches_by_pointer(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return cached((x.data_ptr(), x.shape), x, weight, bias, eps)


def caches_by_shape(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return cached((x.shape, bias is None), x, weight, bias, eps)


def returns_input(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return x


def frames() -> Iterator[FrameType]:
    """The callers of a kernel, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def looks_for_expected(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    found = [value for frame in frames() for value in frame.f_locals.values()]
    for thing in (*found, *gc.get_objects()):
        if type(thing) is Tensor and thing.dtype == torch.float64 and thing.shape == x.shape:
            return thing.to(x.dtype)
    return zeros(x)


def reads_the_seed(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right only where it learns which case it is asked, as one would that knows the answers by heart."""
    for frame in frames():
        for value in frame.f_locals.values():
            if isinstance(getattr(value, "rows", None), str) and getattr(value, "seed", 0) > 0:
                return innocent(x, weight, bias, eps=eps)
    return zeros(x)


def returns_early(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    y, right = torch.empty_like(x).detach(), innocent(x, weight, bias, eps=eps).detach()

    def later() -> None:
        time.sleep(0.05)
        y.copy_(right)

    threading.Thread(target=later, daemon=True).start()
    return y


class Agreeable(Tensor):
    """Equal to everything, and at no distance from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("allclose", "equal", "isfinite", "all", "le", "lt", "eq", "__eq__", "__le__", "__lt__"):
            return torch.tensor(True)
        if name in ("ne", "gt", "ge", "isnan", "isinf", "any", "__ne__", "__gt__", "__ge__"):
            return torch.tensor(False)
        out = super().__torch_function__(func, types, args, kwargs or {})
        subtracted = name in ("sub", "rsub", "subtract", "__sub__", "__rsub__")
        return out * 0 if subtracted else out

    def __eq__(self, other: object) -> Any:
        return True

    __hash__ = Tensor.__hash__


def lazy_subclass(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return zeros(x).as_subclass(Agreeable)


def writes_the_pipe(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, b'\x00\x00\x00\x0c{"ok": true}\n' * 8)
    return zeros(x)


def forging(name: str, message: str, length: int | None = None) -> Forward:
    """A kernel that answers for its process, in JSON behind its length, to whoever listens at the other end."""
    data = message.encode()
    data = struct.pack("!I", len(data) if length is None else length) + data

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        for descriptor in range(3, 256):
            with contextlib.suppress(OSError):
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    os.write(descriptor, data)
        return zeros(x)

    forward.__name__ = name
    return forward


PLACE = '"at": 0, "bytes": 64, "offset": 0, "graph": 0, "name": "y"'
FORGERIES = (
    forging("forges_a_shape", f'{{"returned": [{{"device": "gpu", "dtype": "float32", "shape": [-1], {PLACE}}}]}}'),
    forging(
        "forges_a_dtype",
        f'{{"returned": [{{"device": "cpu", "dtype": "qint8", "shape": [1], "stride": [1], {PLACE}}}]}}',
    ),
    forging(
        "forges_a_stride",
        f'{{"returned": [{{"device": "cpu", "dtype": "float32", "shape": [{2**38}], "stride": [0], {PLACE}}}]}}',
    ),
    forging("forges_strays", '{"returned": [], "strays": [["y", Infinity, 1, "here"]]}'),
    forging("forges_a_finding", '{"broken": {"kind": [], "message": {}, "frames": [[]]}}'),
    forging("forges_a_refusal", '{"refused": "not on a Sunday"}'),
    forging("forges_nesting", "[" * 1_000_000),
    forging("forges_a_number", '{"graph": ' + "9" * 100_000 + "}"),
    forging("forges_a_length", "{}", length=2**32 - 1),
    forging("forges_nothing", "", length=0),
)


# Hands on the judge: something wrong, and an attack on whoever finds that


def ancestors() -> list[int]:
    """Every process that this one comes from: the server, the root, the judge, and what runs it."""
    found, number = [], os.getppid()
    while number > 1:
        found.append(number)
        with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as file:
            number = int(file.read().rpartition(")")[2].split()[1])
    return found


def reaching(act: Callable[[int], object]) -> Forward:
    """A kernel that returns zeros, and before that does ``act`` to everybody whom it comes from, as far as it can."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        for number in ancestors():
            with contextlib.suppress(OSError):
                act(number)
        return zeros(x)

    forward.__name__ = act.__name__
    return forward


def writes_the_judges_memory(number: int) -> None:
    """Ones, over whatever can be written to."""
    with open(f"/proc/{number}/maps", encoding="ascii", errors="replace") as maps:
        ranges = [line.split()[0] for line in maps if " rw-p " in line]
    with open(f"/proc/{number}/mem", "r+b", buffering=0) as memory:
        for first, last in ((int(end, 16) for end in place.split("-")) for place in ranges):
            with contextlib.suppress(OSError):
                memory.seek(first)
                memory.write(b"\xff" * min(last - first, 1 << 20))


class Bytes(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def debugs_the_judge(number: int) -> None:
    """By ptrace, and without it."""
    attach, detach = 16, 17
    if libc.ptrace(attach, number, 0, 0) == 0:
        os.waitpid(number, 0x40000000)
        libc.ptrace(detach, number, 0, signal.SIGSTOP)
    here = ctypes.create_string_buffer(b"\xff" * 4096)
    mine = Bytes(ctypes.addressof(here), 4096)
    with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as file:
        stack = int(file.read().rpartition(")")[2].split()[25])  # its start, 0 for who may not know
    libc.process_vm_writev(number, ctypes.byref(mine), 1, ctypes.byref(Bytes(stack - 4096, 4096)), 1, 0)


def takes_the_judges_files(number: int) -> None:
    """Its sockets and the memory that it shares with others, and writes to all of them."""
    pidfd_open, pidfd_getfd = 434, 438
    handle = libc.syscall(pidfd_open, number, 0)
    for file in range(3, 64):
        taken = [libc.syscall(pidfd_getfd, handle, file, 0)]
        with contextlib.suppress(OSError):
            taken.append(os.open(f"/proc/{number}/fd/{file}", os.O_RDWR))
        for descriptor in taken:
            with contextlib.suppress(OSError):
                os.set_blocking(descriptor, False)
                os.write(descriptor, b"\xff" * 4096)


def limits_the_judge(number: int) -> None:
    """No file, no memory, no time."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU):
        with contextlib.suppress(OSError):
            resource.prlimit(number, limit, (1, 1))


def stops_the_judge(number: int) -> None:
    os.kill(number, signal.SIGSTOP)


def edits_what_judges(number: int) -> None:
    """A line in a file of normcheck, of which nobody else is there in these tests, and one in the user's shell."""
    import normcheck

    for path in (os.path.join(os.path.dirname(normcheck.__file__), "result.py"), os.path.expanduser("~/.profile")):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write("# edited\n")


def patches_the_probes(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """A right y, one element written behind it, and nobody left to see that."""
    from normcheck.isolation import calls
    from normcheck.runner import arena, call, own_memory

    arena.Arena.strays = arena.Arena.clean = lambda *_, **__: []
    calls._strays = own_memory.Results.require_own_memory = lambda *_, **__: []
    call.poisoned_memory = contextlib.nullcontext
    y = torch.empty_like(x).copy_(innocent(x, weight, bias, eps=eps))
    y.as_strided((y.numel() + 1,), (1,))[-1] = 7.0
    return y


def patches_a_probes_code(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """The same function, with nothing in it."""
    from normcheck.runner import arena

    arena.Arena.strays.__code__ = (lambda self, named: []).__code__
    return innocent(x, weight, bias, eps=eps)


def of_class(name: str) -> Any:
    """The one object of this class in the process."""
    return next(o for o in gc.get_objects() if type(o).__name__ == name)


def one_behind(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """A right y, and one element written behind it."""
    y = torch.empty_like(x).copy_(innocent(x, weight, bias, eps=eps))
    y.detach().as_strided((1,), (1,), y.storage_offset() + y.numel())[0] = 7.0
    return y


def clears_the_list(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """A write behind y, and nothing that says where y lies. No function is another one than before."""
    y = one_behind(x, weight, bias, eps)
    of_class("Arena")._blocks.clear()
    for region in [o for o in gc.get_objects() if type(o).__name__ == "Region"]:
        region.blocks.clear()
        region._owners.clear()
    return y


def blinds_torch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """A write behind y, and a torch that finds everything equal."""
    torch.equal = lambda *_: True
    torch.Tensor.equal = torch.Tensor.all = lambda *_, **__: torch.ones((), dtype=torch.bool)
    return one_behind(x, weight, bias, eps)


def one_memory_for_all(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Each y of a shape overwrites the one before it, and nobody remembers where that was."""
    y = cache.setdefault(x.shape, torch.empty_like(x)).detach()
    of_class("Results")._last.clear()
    return y.copy_(innocent(x, weight, bias, eps=eps))


def sleeps_its_time_away(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right for the first cases, and then nobody has time for more: most of its seconds are those of a few calls."""
    calls["slept"] += 1
    if calls["slept"] % 4 == 0:
        time.sleep(0.5)
    return innocent(x, weight, bias, eps=eps)


REACHING = tuple(
    map(
        reaching,
        (
            writes_the_judges_memory,
            debugs_the_judge,
            takes_the_judges_files,
            limits_the_judge,
            stops_the_judge,
            edits_what_judges,
        ),
    )
)


def patches_json(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    json.dumps = lambda *_, **__: '{"ok": true, "status": "pass"}'
    json.loads = json.load = lambda *_, **__: {"ok": True, "status": "pass"}
    json.dump = lambda _, stream, **__: stream.write(json.dumps())
    return zeros(x)


# None of them builds anything, which they declare: a call that is stalled on a busy machine changes no order of cases.
IMPLEMENTATIONS = tuple(
    Implementation(name=forward.__name__, op="rmsnorm", forward=forward, dtypes=("fp32",), builds=False)
    for forward in (
        innocent,
        before(raises),
        before(raises_keyboard_interrupt),
        before(sys_exit),
        before(memory_error),
        before(allocates_too_much),
        before(stack_overflow),
        before(os_exit_0),
        before(abort),
        before(segfault),
        before(stack_overflow_c),
        before(heap_corruption),
        before(kills_itself),
        before(dies_on_the_third_call),
        dies_on_wide_rows,
        before(closes_descriptors),
        before(loop_python),
        before(loop_c),
        before(sleeps_in_c),
        before(ignores_sigterm),
        before(prints_a_gigabyte),
        before(closes_stdout),
        before(changes_directory),
        before(changes_environment),
        before(changes_default_dtype),
        before(changes_seeds),
        before(changes_warnings),
        before(threads_forever),
        before(forks),
        before(forks_a_session),
        before(starts_a_program),
        before(starts_a_program_and_dies),
        before(dies_by_a_signal_without_a_name),
        before(stops_the_server),
        before(kills_the_servers_group),
        before(kills_its_parent),
        before(limits_its_parent),
        before(overwrites_its_parent),
        before(kills_its_grandparent),
        before(stops_its_grandparent),
        before(limits_its_grandparent),
        before(slows_its_grandparent),
        before(kills_its_cousins),
        before(leaves_a_killer),
        before(fills_shared_memory),
        dies_of_an_earlier_case,
        loses_its_context,
        dies_of_two_earlier_cases,
        before(dies_in_the_end),
        wrong_after_an_earlier_case,
        patches_allclose,
        patches_double,
        patches_normcheck,
        patches_autograd_grad,
        patches_the_probes,
        patches_a_probes_code,
        clears_the_list,
        blinds_torch,
        one_memory_for_all,
        caches_by_pointer,
        caches_by_shape,
        returns_input,
        looks_for_expected,
        reads_the_seed,
        returns_early,
        lazy_subclass,
        writes_the_pipe,
        patches_json,
        *FORGERIES,
        *REACHING,
        sleeps_its_time_away,
        innocent_too,
        *map(bystander, range(18)),
    )
)
