"""What a new process does to itself before it runs code under test: it ends with its parent, and nobody hears it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
import warnings
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def close_all_but(kept: int) -> None:
    """Close what came with the fork: by some of it the server would be kept alive, or be spoken to.

    Each number stays taken, by nothing: whoever owned it may close it once more, and must not then close another's.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (kept, nothing):
            os.dup2(nothing, number)
    vars(forkserver._forkserver)["_forkserver_alive_fd"] = None
    vars(resource_tracker._resource_tracker)["_fd"] = None


def settle(output: int) -> None:
    """Make this process one that ends with its parent, prints to ``output`` and leaves no core behind.

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
    """Fork. This returns in the child only; the parent waits for it, and then ends as the child did.

    A kernel that kills, stops or changes its parent, or that parent's group, then hits a process of its own, and not
    the server from which other workers come. What the kernel leaves behind is that parent's, and ends with it.
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
    """The wait status of ``child``. This process holds nothing open meanwhile, so that its end shows at once."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):
                os.close(number)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return status


def _end_as(status: int) -> None:
    """End this process by the signal or with the exit code of another one's wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def adopt_orphans() -> None:
    """Make this process, the server, the parent of what its workers leave behind, so that it can be found and ended."""
    if sys.platform == "linux":
        os.setsid()  # a signal to its group reaches nobody else
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # It says so when a process ends that it has not started.
        warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


def _end_with_parent() -> None:
    """Ask the system to kill this process when the one that started it ends, and to let it keep its descendants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
