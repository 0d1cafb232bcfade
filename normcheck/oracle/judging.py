"""Judging by the faster of two judges: the fused one passes a case, the plain one says everything else about it.

The fused judge (``fused/judge.py``) works on what it suits. What it does not pass, the plain judge judges: so no kernel
is accused, and no finding is described, by anything but the plain formulas. Each process that uses it has it judge one
right and one wrong case first, with the flags of the case at hand, beside the plain judge (``fused/trial.py``).
On a GPU that goes on in a thread, since it may compile for seconds: until then the plain judge judges.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from normcheck.oracle import quantised
from normcheck.oracle.judge import Checked, Judge, Reference
from normcheck.oracle.judge_backward import judge_gradients as plain_gradients
from normcheck.oracle.judge_forward import judge_forward as plain_forward

PLAIN, FUSED = "plain", "fused"
JUDGES = (FUSED, PLAIN)
"""The judges that a user may choose, the default first."""

Begun = Callable[[], tuple[Checked, ...]]
"""Waits for a judgement that was begun, and returns its checks; every call returns the same."""


def begin_forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[Begun, Reference]:
    """Begin to judge ``outputs``, see ``judge_forward``. The reference can be used before the judgement is waited for.

    On a GPU it goes on beside what the caller does next. So ``outputs`` must stay as they are until then. Raises
    NormcheckError if the fused judge has failed its trial.
    """
    if judge.op.quantises:
        checked, saved = quantised.judge_codes(judge, outputs)
        return lambda: checked, saved
    if not can_be_fused(judge, outputs):
        checked, saved = plain_forward(judge, outputs)
        return lambda: checked, saved
    from normcheck.oracle.fused import judge as fused

    finish, saved = fused.forward(judge, outputs)
    return _once(lambda: finish() or plain_forward(judge, outputs)[0]), saved


def begin_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> Begun:
    """Begin to judge ``gradients``, see ``judge_gradients``."""
    if saved.kept is None or not gradients:
        checked = plain_gradients(judge, gradients, saved, given=given, own_bits=own_bits)
        return lambda: checked
    from normcheck.oracle.fused import judge as fused

    finish = fused.gradients(judge, gradients, saved, given=given, own_bits=own_bits)
    return _once(lambda: finish() or plain_gradients(judge, gradients, saved, given=given, own_bits=own_bits))


def judge_forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[tuple[Checked, ...], Reference]:
    """See ``judge_forward.judge_forward``."""
    begun, saved = begin_forward(judge, outputs)
    return begun(), saved


def judge_gradients(
    judge: Judge, gradients: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> tuple[Checked, ...]:
    """See ``judge_backward.judge_gradients``."""
    return begin_gradients(judge, gradients, saved, given=given, own_bits=own_bits)()


def can_be_fused(judge: Judge, outputs: Mapping[str, Tensor]) -> bool:
    """Whether the fused judge judges this case. It does once it has passed its trial, which goes on beside on a GPU.

    Raises NormcheckError if it has failed.
    """
    if not _may_be_fused(judge):
        return False
    from normcheck.oracle.fused.trial import is_trusted

    return is_trusted(judge, outputs)


def _may_be_fused(judge: Judge) -> bool:
    if judge.op.quantises or not (judge.fused and kernels_work(judge.x.device.type)):
        return False
    from normcheck.oracle.fused import judge as fused

    return fused.suits(judge)


def anticipate(judge: Judge) -> None:
    """Make what a small case will be compared with, as far as its outputs are not needed, if the plain judge may."""
    if not _may_be_fused(judge):
        judge.anticipate()


def trust(judge: Judge, outputs: Mapping[str, Tensor]) -> None:
    """Wait for the trial of the fused judge for cases like this one, if it can judge them, whatever it is worth."""
    if judge.fused and not judge.op.quantises and kernels_work(judge.x.device.type):
        from normcheck.oracle.fused import trial

        trial.begin(trial.key_of(judge, outputs)).join()


def be_in_crowd() -> None:
    """From now on compile the fused judge only where it saves more: other processes want the cores."""
    from normcheck.oracle.fused import trial

    trial.in_crowd = True


def compiling_seconds() -> float:
    """The seconds for which cases of this process have waited until the fused judge was compiled."""
    launch = sys.modules.get("normcheck.oracle.fused.launch")
    return 0.0 if launch is None else float(launch.compiling_seconds)


@cache
def kernels_work(device: str) -> bool:
    """Whether the fused judge's kernels run there: Triton's on a GPU that it supports, on a CPU those of C."""
    if device == "cpu":
        from normcheck.oracle.fused import on_cpu

        return on_cpu.works()
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return not interpreted and find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)


def _once(call: Callable[[], tuple[Checked, ...]]) -> Begun:
    """``functools.cache`` for a function without arguments, which is made in a twentieth of the time."""
    known: tuple[Checked, ...] | None = None

    def begun() -> tuple[Checked, ...]:
        nonlocal known
        if known is None:
            known = call()
        return known

    return begun
