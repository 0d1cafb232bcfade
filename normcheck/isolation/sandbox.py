"""The sandbox of a kernel's process: where it may write, and what it may do to other processes, which is nothing.

The system holds it, not this package: no debugging of what is not its own, no right of root, no file changed outside
the folders of ``Sandbox``. ``Reach`` says what of it holds here, by trying.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import getpass
import hashlib
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from normcheck.errors import NormcheckError, error_text
from normcheck.files import module_of
from normcheck.impls import _cudnn_shelf, discovery
from normcheck.isolation import landlock, seccomp

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_CLEAR_AMBIENT, _MOST_CAPABILITIES = 4, 64
_CAPABILITY_VERSION = 0x20080522

_CLONE_NEWNS = 0x20000
_MS_READ_ONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18

_SYSTEM = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi")
"""What belongs to the system in /proc, and root may write to without any further right."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "shm", "dri", "kfd")
"""In /dev, beside NVIDIA's: what any process may write to. CUDA's memory of two processes is counted in /dev/shm."""

_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
    _cudnn_shelf.FOLDER: "plans",
    "CUPY_CACHE_DIR": "cupy",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "HELION_CACHE_DIR": "helion",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
    "QUACK_CACHE_DIR": "quack",
    "TILELANG_CACHE_DIR": "tilelang",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "XDG_CACHE_HOME": "cache",
    "TMPDIR": "tmp",
}
"""Variable of the environment that says where a compiler keeps what it has made -> its folder in a sandbox.

HOME stays: packages look there for what they only read, and so does who looks for models, by HF_HOME."""

_ANSWERED = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
"""What inductor asks again in each new folder of caches: it compiles a test for each set of vector instructions that
the processor has, in a process that imports torch, before it makes its first kernel for the CPU: 47 s for a new eps."""

RUN_FOLDER = "normcheck-run-"


@dataclass(frozen=True)
class Sandbox:
    """Where a kernel's process may write. ``folder``: its own, for temporary files and what is compiled for it.

    ``caches``: those of the user, which only normcheck's own implementations may fill; a user's file finds its own in
    ``folder``, so that what it puts there is never run by a judge or by another kernel.
    """

    folder: str
    caches: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: str) -> Self:
        """The sandbox of what ``spec`` names: one folder for each file, or own implementation, until this process ends.

        A plan takes it along to the processes that judge: what one process of a file compiles is there for all others
        of that file, and for no other's.
        """
        whose = module_of(spec) or spec
        folder = os.path.join(run_folder(os.getpid()), hashlib.sha256(whose.encode()).hexdigest()[:16])
        return cls(folder, _users_caches() if spec in discovery.implementations() else {})

    @classmethod
    def told(cls, told: Mapping[str, Any]) -> Self:
        """The sandbox that ``as_message`` describes."""
        return cls(str(told["folder"]), {str(name): str(path) for name, path in told["caches"].items()})

    @property
    def as_message(self) -> dict[str, Any]:
        """This sandbox as plain data."""
        return {"folder": self.folder, "caches": dict(self.caches)}

    def make(self) -> None:
        """Make its folders, if they are not there. Raises OSError, but not for a cache that the user may not make."""
        for path in (self.folder, *self._own.values()):
            os.makedirs(path, mode=0o700, exist_ok=True)
        for path in self.caches.values():
            with suppress(OSError):
                os.makedirs(path, mode=0o700, exist_ok=True)

    @property
    def _own(self) -> dict[str, str]:
        return {name: os.path.join(self.folder, place) for name, place in _CACHES.items()}

    def last_built(self) -> float:
        """When something was last put into a folder of what compiles, in seconds since the epoch; 0.0 if none is there.

        A compiler makes an entry, or a folder for several, for each thing that it builds.
        """
        found = [0.0]
        for place in (path for name, path in self._own.items() if name != "TMPDIR"):
            with suppress(OSError), os.scandir(place) as entries:
                found += [os.stat(place).st_mtime, *(entry.stat().st_mtime for entry in entries if entry.is_dir())]
        return max(found)

    def enter(self) -> None:
        """Put this process into the sandbox, for good. It has one thread, and has opened what it needs.

        What this system does not have is left out: ``Reach`` tells.
        """
        models = os.path.join(_users_caches()["XDG_CACHE_HOME"], "huggingface")
        os.environ.update({"HF_HOME": models, **_ANSWERED, **os.environ, **self._own, **self.caches})
        tempfile.tempdir = self._own["TMPDIR"]
        if sys.platform != "linux":
            return
        processes = _processes()
        writable = (self.folder, *self.caches.values(), *_devices(), processes)
        _drop_capabilities()
        with suppress(OSError):
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        with suppress(OSError):
            seccomp.refuse_hands_on_others(sockets=needs_sockets())
        with suppress(OSError):
            landlock.restrict(writable)


@dataclass(frozen=True)
class Reach:
    """What a process can do to others: change a file of its user outside the sandbox, open the memory of the process
    that judges, send signals to it, set its limits, ask services of this machine by a local socket, use a right of
    root, get one by starting a program that has it, and have them all in a namespace of users.
    """

    files: bool
    memory: bool
    signals: bool
    limits: bool
    services: bool
    rights: bool
    programs: bool
    spaces: bool

    @classmethod
    def tried(cls, file: str, judge: int) -> Self:
        """What this process can do, by trying. ``file``: one of its user's; ``judge``: a process, by its id."""
        return cls(
            files=_works(lambda: os.close(os.open(file, os.O_WRONLY))),
            memory=_works(lambda: os.close(os.open(f"/proc/{judge}/mem", os.O_RDWR))),
            signals=_works(lambda: os.kill(judge, 0)),
            limits=_works(lambda: resource.prlimit(judge, resource.RLIMIT_CORE)),
            services=_works(lambda: socket.socket(socket.AF_UNIX).close()),
            rights=int(_status("CapEff"), 16) != 0,
            programs=_status("NoNewPrivs") != "1",
            spaces=_works(_become_root),
        )


def _works(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _become_root() -> None:
    """Have a child, which has one thread, make a namespace of users. Raises OSError if it may not."""
    child = os.fork()
    if child == 0:
        os._exit(not _works(lambda: _called("unshare", ctypes.c_int(seccomp.NEW_USERS))))
    if os.waitpid(child, 0)[1]:
        raise PermissionError("unshare")


def _status(name: str) -> str:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def close_memory() -> None:
    """Close this process's memory and files to all other processes of its user, and leave no core file."""
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def open_memory() -> None:
    """Undo ``close_memory``, for a debugger."""
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 1)


def _devices() -> tuple[str, ...]:
    nvidia = [name for name in os.listdir("/dev") if name.startswith("nvidia")]
    return (*(f"/dev/{name}" for name in (*_DEVICES, *nvidia)), _mps())


def needs_sockets() -> bool:
    """Whether a kernel must be able to use local sockets: CUDA does not start without."""
    return os.path.exists("/dev/nvidiactl")


def _mps() -> str:
    """Where NVIDIA's server that shares a GPU listens, if there is one."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")


def _processes() -> str:
    """Where this process and those that it starts may write of /proc: CUDA names its threads there, or does not start.

    All of it, if what is the system's there is read-only (``lock_system``) or not root's to write; else only this
    process's own.
    """
    return "/proc/self" if any(os.access(path, os.W_OK) for path in _SYSTEM) else "/proc"


def lock_system() -> None:
    """Make the system's part of /proc read-only, for this process and those that come from it, if root has the right.

    The root of all workers does it once: a namespace of mounts for each of them would cost 10 ms at its start and end.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    with suppress(OSError):
        _called("unshare", ctypes.c_int(_CLONE_NEWNS))
        _mount("none", "/", _MS_REC | _MS_PRIVATE)
        for path in filter(os.path.exists, _SYSTEM):
            _mount(path, path, _MS_BIND | _MS_REC)
            _mount("none", path, _MS_BIND | _MS_REMOUNT | _MS_READ_ONLY)


def _mount(source: str, target: str, flags: int) -> None:
    _called("mount", source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)


def _users_caches() -> dict[str, str]:
    """Where compilers keep for this user what they have made, by the variable that says so."""
    temporary = Path(tempfile.gettempdir())
    try:
        home = Path.home()
    except RuntimeError:  # a container's user without one
        home = temporary
    cache_home = home / ".cache"
    usual = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": temporary / f"torchinductor_{_user()}",
        "TORCH_EXTENSIONS_DIR": cache_home / "torch_extensions",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
        "XDG_CACHE_HOME": cache_home,
    }
    compiled = {"PYTHONPYCACHEPREFIX": sys.pycache_prefix} if sys.pycache_prefix else {}
    return {name: os.environ.get(name) or str(path) for name, path in usual.items()} | compiled


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


@cache
def run_folder(process: int) -> str:
    """A folder of this ``process`` in the temporary folder, which is deleted when it ends.

    Those of runs that were killed, and could not delete them, are deleted first.
    """
    try:
        with suppress(OSError):  # a folder that nobody may list
            _delete_abandoned(tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER)
        with suppress(OSError):  # a file system without locks: nobody deletes it, if this process cannot
            while _lock(folder, os.O_CREAT) is None:  # somebody took it for abandoned, before it was locked
                folder = tempfile.mkdtemp(prefix=RUN_FOLDER)
    except OSError as error:
        expected = "expected a folder that can be written, for what kernels write: set it to one"
        raise NormcheckError(f"TMPDIR={os.environ.get('TMPDIR', '')}: {expected} ({error_text(error)})") from error

    def delete() -> None:
        if os.getpid() == process:  # not in a process that was forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
    return folder


def _lock(folder: str, more: int = 0) -> int | None:
    """Lock a run's folder until this process ends -> the descriptor of its lock; None if another process has it.

    Raises OSError if there is no lock to take, or if this file system has none.
    """
    lock = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | more, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)  # another process has it, or has just deleted it with its folder
    return None


def _delete_abandoned(temporary: str) -> None:
    """Delete this user's folders of runs that have ended: nobody holds their locks."""
    for entry in os.scandir(temporary):
        with suppress(OSError):  # without a lock: it is being made, or somebody else's
            own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if entry.name.startswith(RUN_FOLDER) and own and (lock := _lock(entry.path)) is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _drop_capabilities() -> None:
    """Give up every right of root that the user's id alone does not give."""
    with suppress(OSError):  # who has no such rights may not give any up
        for number in range(_MOST_CAPABILITIES):
            _prctl(_PR_CAPBSET_DROP, number)
    with suppress(OSError):
        _prctl(_PR_CAP_AMBIENT, _CLEAR_AMBIENT)
    with suppress(OSError):
        _called("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _called("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def _called(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
