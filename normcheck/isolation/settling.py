"""Set up a new process before it runs code under test: it ends with its parent, and prints to nobody else."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _OF_ITS_OWN_BYTES = 256 << 20, 32 << 20  # the second is the most that glibc takes


def close_all_but(kept: int) -> None:
    """Close the files that came with the fork: some would keep the server alive, or let a kernel write to it.

    Their numbers stay in use, for /dev/null: a former owner may close its number again, which must be no other file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (kept, nothing):
            os.dup2(nothing, number)


def settle(output: int) -> None:
    """Make this process end with its parent, print to the file descriptor ``output`` and leave no core file.

    Its parent is not the server, but a process in between, which runs no code under test either.
    """
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    _put_a_parent_between()
    faulthandler.enable(all_threads=False)


def _put_a_parent_between() -> None:
    """Fork, and return in the child only; the parent waits for the child, and then ends as it did.

    A kernel that kills, stops or changes its parent, or its parent's group, then hits this one, and not the server from
    which other workers come. The processes that the kernel leaves behind belong to this parent, and end with it.
    """
    os.setsid()
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    try:
        _end_as(_end_of(child))
    finally:
        os._exit(1)


def _end_of(child: int) -> int:
    """Wait for ``child`` -> its wait status. Files are closed first, so that the child's end shows at once."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):
                os.close(number)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return status


def _end_as(status: int) -> None:
    """End this process as another one did: by the signal, or with the exit code, of its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def keep_freed_memory() -> None:
    """Let this process, and those forked from it, take freed memory again in place of new pages from the system.

    Those cost ten times as much as a sum of two arrays of half a MiB, of which an interpreted kernel makes hundreds.
    """
    with suppress(AttributeError):  # another libc has not that
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OF_ITS_OWN_BYTES)


def adopt_orphans() -> None:
    """Let this process, the root or a server, adopt what workers leave behind, so that it can be found and killed."""
    if sys.platform == "linux":
        os.setsid()  # a signal to its group reaches nobody else
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    """Ask the system to kill this process when its parent ends, and to let it adopt its orphaned descendants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
