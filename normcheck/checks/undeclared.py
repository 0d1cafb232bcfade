"""What a declaration buys: the outputs of a case under the bounds of a kernel that declares nothing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from normcheck.checks.gradients import UNREAD, Call, Gradients, autograd_checks
from normcheck.oracle.judge import GIVEN_REFERENCE, Checked, judge_forward, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.tolerances import is_wider


def undeclared(this: Call, outputs: Mapping[str, Tensor], gradients: Gradients) -> tuple[Checked, ...]:
    """The checks of ``outputs`` and ``gradients`` under ``this.base``; none if what is declared widens nothing of it.

    A check that is declared away is made here, so that a reader sees what it would have said.
    """
    if not is_wider(this.model, this.base):
        return ()
    judge = judge_of(this.op, this.case, this.pristine, this.base, {})
    checked, saved = judge_forward(judge, outputs)
    if this.implementation.backward is None:
        own = gradients.end_to_end
        return checked + autograd_checks(judge, this.pristine, outputs, own, saved).checked
    own_bits = this.op.clamped and ("bitmask" not in outputs or UNREAD in gradients.notes)
    if any(c.check == GIVEN_REFERENCE for c in gradients.checked):
        checked += judge_gradients(judge, gradients.staged, saved, given=True, own_bits=own_bits)
    if gradients.checked:
        checked += judge_gradients(judge, gradients.end_to_end, saved, given=False, own_bits=own_bits)
    return checked
