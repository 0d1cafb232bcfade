"""Fork on request: what the root does, and each server that comes from it, until nobody asks any more.

The root imports torch once and forks servers; a server forks the processes in which code under test runs. So a server
that no code under test can have reached costs a fork, and not the two seconds of an import.

multiprocessing's own fork server would do, but for what is needed here: to find it, end it, start another without a
new import, and cut a process off from it. All of that is private there.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import NoReturn

from normcheck.isolation.messages import Inbox, Message
from normcheck.isolation.sandbox import close_memory, lock_system
from normcheck.isolation.settling import adopt_orphans, keep_freed_memory

Run = Callable[[socket.socket], None]

CODE = struct.Struct("i")
"""The exit code of a process, minus the number of the signal that ended it, as it is written to its status pipe."""


def main(number: int, door: int, modules: Sequence[str] = ()) -> NoReturn:
    """Be the root: import what workers need, and these ``modules`` of torch, then fork servers as the socket with this
    file descriptor asks for. ``door``: that of another socket, through which come requests for roots like this one.

    Its memory is closed to other processes, and that of what it forks; for all of them what is the system's in /proc is
    read-only.
    """
    close_memory()
    lock_system()
    keep_freed_memory()
    gc.disable()  # to look for garbage, of which imports make none that matters, took a fifth of their time
    for module in modules:
        import_module(module)
    from normcheck.isolation import preload

    gc.enable()
    forks = partial(serve_forks, run=preload.serve)
    serve_forks(socket.socket(fileno=number), forks, socket.socket(fileno=door))
    os._exit(0)  # without the half second in which Python takes torch apart


def serve_forks(control: socket.socket, run: Run, door: socket.socket | None = None) -> None:
    """Fork a process for each request, until the other side of ``control`` is closed.

    A request comes with two files: the socket with which the new process calls ``run``, and a pipe for its exit code.
    The answer is its process id. What comes through ``door`` is the ``control`` of a process like this one.
    """
    adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process at the terminal
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    status_of: dict[int, int] = {}  # process id -> where its exit code goes
    poll = select.poll()
    asked_at = [control.fileno(), *([] if door is None else [door.fileno()])]
    for source in (woken, *asked_at):
        poll.register(source, select.POLLIN)
    while True:
        ready = {source for source, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 1 << 16)
            _reap(status_of)
        if door is not None and door.fileno() in ready:
            _, came, _, _ = socket.recv_fds(door, 1, 1)
            if not came:  # nobody is behind it any more
                poll.unregister(door.fileno())
            elif os.fork() == 0:
                _close(*asked_at, woken, wake, *status_of.values())
                _be_another(socket.socket(fileno=came[0]), run)
            else:
                os.close(came[0])
        if control.fileno() not in ready:
            continue
        asked = _received(control)
        if asked is None:
            return
        message, (theirs, status) = asked
        child = os.fork()
        if child == 0:
            _close(*asked_at, woken, wake, status, *status_of.values())
            _become(message, socket.socket(fileno=theirs), run)
        os.close(theirs)
        status_of[child] = status
        control.sendall(CODE.pack(child))


def _received(control: socket.socket) -> tuple[Message, list[int]] | None:
    """A request and its files; None if nobody asks any more."""
    inbox, files = Inbox(), list[int]()
    while (message := inbox.next()) is None:
        chunk, came, _, _ = socket.recv_fds(control, 1 << 16, 2)
        files += came
        if not chunk:
            return None
        inbox.add(chunk)
    return message, files


def _reap(status_of: dict[int, int]) -> None:
    """Tell the exit codes of the processes that have ended; some are orphans, for whose code nobody waits."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            return
        file = status_of.pop(ended, None)
        if file is not None:
            with suppress(BrokenPipeError):
                os.write(file, CODE.pack(os.waitstatus_to_exitcode(status)))
            os.close(file)


def _close(*files: int) -> None:
    signal.set_wakeup_fd(-1)
    for file in files:
        os.close(file)


def _be_another(control: socket.socket, run: Run) -> NoReturn:
    """In a new process: be another root, which first tells its process id."""
    try:
        control.sendall(CODE.pack(os.getpid()))
        serve_forks(control, run)
    finally:
        os._exit(0)


def _become(message: Message, connection: socket.socket, run: Run) -> NoReturn:
    """In the new process: go where the asking process is, run, and end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if message["path"] is not None:  # another interpreter has modules of its own
            sys.path[:] = message["path"]
        with suppress(OSError):
            os.chdir(message["folder"])
        run(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
