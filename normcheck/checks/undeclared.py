"""The effect of declarations: the outputs of a case, judged as if the kernel declared nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from normcheck.checks.gradients import UNREAD, Gradients, InFlight, autograd_checks
from normcheck.oracle.judge import GIVEN_REFERENCE, Checked, judge_of
from normcheck.oracle.judging import judge_forward, judge_gradients
from normcheck.oracle.tolerances import is_wider

_NOT_WIDER = (
    *("sum", "scale", "scale_floor", "scale_limit", "round_before_quant", "scaling"),
    *("gate", "activation", "rounding", "round_gated", "group", "eps", "round_factor", "pairs"),
)
"""Keys of a model that say what is computed, and widen no bound."""


def undeclared(running: InFlight, outputs: Mapping[str, Tensor], gradients: Gradients) -> tuple[Checked, ...]:
    """Judge ``outputs`` and ``gradients`` by ``running.base``; () if the declared model widens no bound of it.

    A check that a declaration switches off is made here, so that a reader sees its result.
    """
    if not is_wider(running.model, running.base):
        return ()
    base = replace(running.base, **{key: getattr(running.model, key) for key in _NOT_WIDER})
    judge = judge_of(running.op, running.case, running.pristine, base, {}, fused=running.judge.fused)
    checked, saved = judge_forward(judge, outputs)
    if running.op.quantises:
        return checked
    if running.implementation.backward is None:
        own = gradients.end_to_end
        return checked + autograd_checks(judge, running.pristine, outputs, own, saved).checked
    own_bits = running.op.clamped and ("bitmask" not in outputs or UNREAD in gradients.notes)
    if any(c.check == GIVEN_REFERENCE for c in gradients.checked):
        checked += judge_gradients(judge, gradients.staged, saved, given=True, own_bits=own_bits)
    if gradients.checked:
        checked += judge_gradients(judge, gradients.end_to_end, saved, given=False, own_bits=own_bits)
    return checked
