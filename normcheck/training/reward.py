"""``normcheck.reward``: what a training loop learns of a kernel's file, as one number and its reason."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normcheck.cases.dtypes import DTYPES
from normcheck.errors import UsageError, one_line, one_of, shown
from normcheck.gate.options import ops
from normcheck.impls import discovery
from normcheck.options import built
from normcheck.training.options import RewardOptions
from normcheck.training.process import NoAnswer, answer
from normcheck.training.score import STAGES, Reward

_SLOWEST = 8.0  # times the seconds, and
_STEADY_SECONDS = 240.0  # more: no file takes longer, however it tries
_SANE_SECONDS = 60.0  # for a kernel that is known to be right
_KNOWN_GOOD = "torch"


def reward(
    path: str | os.PathLike[str],
    op: str,
    seconds: float = 5.0,
    *,
    dtypes: str | Sequence[str] = DTYPES,
    seed: int | None = None,
    device: str = "auto",
) -> Reward:
    """Judge the kernel in a file, in processes of its own, in some ``seconds``; docs/reward.md has the promise.

    ``path``: FILE.py, with a function named as ``op`` or IMPLEMENTATIONS in it, or FILE.py:NAME, as for ``--impl``; the
    function is f(x, weight, bias, eps) -> y with the shapes and dtypes of ``Implementation``. ``seconds``: how many
    cases there are follows from it. ``seed``: draws the cases; without it the system draws one, which is returned.
    ``device``: auto, cpu or cuda.

    The first call in a process starts a judge, which takes some seconds; it stays until this process ends. Calls of
    several threads take turns. Raises UsageError for wrong arguments; nothing that is in the file makes it raise.
    """
    spec = _spec(path)
    if not isinstance(op, str) or op not in tuple(ops()):
        raise UsageError(f"op={shown(op, 60)}: expected {one_of(ops())}")
    given = {"op": op, "seconds": _number(seconds), "dtype": dtypes, "device": device}
    options = built(RewardOptions, {**given, "seed": secrets.randbelow(1 << 31) if seed is None else seed})
    question = {
        "spec": spec,
        "op": op,
        "dtypes": tuple(dict.fromkeys(options.dtype)) or DTYPES,
        "seconds": options.seconds,
        "seed": options.seed,
        "device": options.device,
    }
    return _answered(question)


def _answered(question: dict[str, Any]) -> Reward:
    """The judge's answer. A judge that ends is asked again, as another process; then it is asked whether it still can.

    If it judges a kernel that is known to be right, this file is what ended it, and that is the file's fault.
    """
    patience = _SLOWEST * float(question["seconds"]) + _STEADY_SECONDS
    why = ""
    for _ in range(2):
        try:
            return Reward.told(answer(question, patience))
        except NoAnswer as lost:
            why = str(lost)
            if lost.late:
                break
    unknown = Reward(
        ok=False,
        score=None,
        worst_ratio=None,
        kind="unjudged",
        why=f"{why}, and does so with a kernel that is right",
        stage="unjudged",
        seed=int(question["seed"]),
    )
    try:
        sane = Reward.told(answer({**question, "spec": _KNOWN_GOOD, "seconds": 1.0}, _SANE_SECONDS))
    except NoAnswer:
        return unknown
    if sane.score is None:
        return replace(unknown, why=f"{why}; {sane.why}")
    words = f"{why} because of this file; it judges another one"
    return replace(unknown, score=STAGES["first case"][0], kind="wrong", stage="first case", why=words)


def _spec(path: object) -> str:
    """FILE.py or FILE.py:NAME with an absolute path. Raises UsageError, also if there is no such file."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path={shown(path)}: expected FILE.py or FILE.py:NAME")
    text = os.fsdecode(path)
    file, colon, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if not file.endswith(".py") or "\0" in text or (colon and not name):
        raise UsageError(f"path={one_line(text, 200)}: expected FILE.py or FILE.py:NAME")
    discovery.looked_at(file, ())
    return f"{os.path.abspath(file)}{colon}{name}"


def _number(seconds: object) -> object:
    """An integer as the float that the option takes."""
    return float(seconds) if isinstance(seconds, int) and not isinstance(seconds, bool) else seconds
