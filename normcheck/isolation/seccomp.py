"""Linux's seccomp: system calls by which one process changes another are refused, to this process and what it starts.

Landlock says nothing of them: a user may set the limits of all of their processes, and ask a service of theirs, such as
a container's or a terminal's, to run a program outside the sandbox. In a namespace of users anybody is root, with all
the rights that were given up. Facts are from seccomp(2), clone(2) and user_namespaces(7), and the numbers from the
kernel's tables of system calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import sys
from dataclasses import dataclass

_SET_FILTER, _AT_FULL_SPEED = 1, 1 << 2  # without the second, older kernels slow the whole process down
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of 32 bits at an offset; jumps; the answer
_NUMBER_AT, _PROCESSOR_AT, _FIRST_AT, _SECOND_AT = 0, 4, 16, 24  # in struct seccomp_data; the lower half of arguments
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NEW_USERS = 0x10000000
"""The flag of clone and unshare that asks for a new namespace of users."""
_X32 = 0x40000000  # system calls of another interface of the same processor have this bit


@dataclass(frozen=True)
class _Calls:
    """The numbers of a processor's system calls. ``others``: those that are only about other processes, or go past
    this filter.
    """

    processor: int
    seccomp: int
    others: tuple[int, ...]
    prlimit: int
    setpriority: int
    socket: int
    clone: int
    unshare: int
    clone3: int


_CALLS = {  # others: ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, io_uring_setup, setns
    "x86_64": _Calls(0xC000003E, 317, (101, 310, 311, 438, 425, 308), 302, 141, 41, 56, 272, 435),
    "aarch64": _Calls(0xC00000B7, 277, (117, 270, 271, 438, 425, 268), 261, 140, 198, 220, 97, 435),
}


class _Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step))]


def refuse_hands_on_others(*, sockets: bool) -> None:
    """From now on this thread and what it starts get EPERM for such calls: debugging another process, reading or
    writing its memory, taking its files, setting its limits or its priority; for a namespace of users; and for local
    sockets, by which one asks the services of this machine, unless they may have ``sockets``.

    clone3 is a call that this system does not know, since a filter cannot read its flags: libraries then call clone.
    Nothing happens on an unknown processor. The thread must have no new privileges. Raises OSError.
    """
    calls = _CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return
    steps = _steps(calls, sockets=sockets)
    program = _Program(len(steps), (_Step * len(steps))(*(_Step(*step) for step in steps)))
    flags = ctypes.c_ulong(_SET_FILTER), ctypes.c_ulong(_AT_FULL_SPEED)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(calls.seccomp), *flags, ctypes.byref(program)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")


def _steps(calls: _Calls, *, sockets: bool) -> list[tuple[int, int, int, int]]:
    """The filter: (code, steps to skip if it holds, if it does not, value). The answers stand at its end."""
    body: list[tuple[int, str, str, int]] = [
        (_LOAD, "", "", _PROCESSOR_AT),
        (_EQUAL, "", "refuse", calls.processor),
        (_LOAD, "", "", _NUMBER_AT),
        (_AT_LEAST, "refuse", "", _X32),
        *((_EQUAL, "refuse", "", number) for number in calls.others),
        (_EQUAL, "unknown", "", calls.clone3),
        (_EQUAL, "spaces", "", calls.clone),
        (_EQUAL, "spaces", "", calls.unshare),
        (_EQUAL, "limits", "", calls.prlimit),
        (_EQUAL, "priority", "", calls.setpriority),
        (_EQUAL, "allow" if sockets else "family", "allow", calls.socket),
    ]
    answers: dict[str, tuple[tuple[int, str, str, int], ...]] = {
        "priority": ((_LOAD, "", "", _SECOND_AT), (_EQUAL, "allow", "refuse", 0)),  # whose, 0 for its own
        "limits": ((_LOAD, "", "", _FIRST_AT), (_EQUAL, "allow", "refuse", 0)),  # whose
        "spaces": ((_LOAD, "", "", _FIRST_AT), (_ANY_BIT, "refuse", "allow", NEW_USERS)),  # flags
        "family": ((_LOAD, "", "", _FIRST_AT), (_EQUAL, "refuse", "allow", socket.AF_UNIX)),  # of a socket
        "unknown": ((_RETURN, "", "", _UNKNOWN),),
        "refuse": ((_RETURN, "", "", _REFUSE),),
        "allow": ((_RETURN, "", "", _ALLOW),),
    }
    place = {}
    for name, steps in answers.items():
        place[name] = len(body)
        body += steps
    return [
        (code, place[yes] - at - 1 if yes else 0, place[no] - at - 1 if no else 0, value)
        for at, (code, yes, no, value) in enumerate(body)
    ]
