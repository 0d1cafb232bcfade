"""Every expected value and every bound of a case, without a kernel's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases.dtypes import CODES
from normcheck.cases.inputs import torch_dtype
from normcheck.cases.tensor_names import CODES as Q
from normcheck.cases.tensor_names import DRESIDUAL_GATE, DSCALE, DSHIFT, RESIDUAL_OUT, SCALE
from normcheck.oracle.compare import Expectation
from normcheck.oracle.judge import Judge, Reference
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.quantised import judge_codes, scale_columns


def expectations(
    judge: Judge, statistics: Mapping[str, Tensor] | None = None, *, own_bits: bool = False
) -> tuple[Expectation, ...]:
    """The expectations that ``judge`` would compare a kernel's outputs with, block by block.

    ``statistics``: those that a kernel saved, M elements of any shape, for the check that is given them; default: the
    reference's. ``own_bits``: see ``judge_gradients``; True for a kernel without a backward of its own.
    """
    case, device = judge.case, judge.x.device
    seen: list[Expectation] = []
    y = torch.zeros((case.M, case.N), dtype=torch_dtype(case.dtype), device=device)
    saved = judge_forward(replace(judge, watch=None), {"y": y})[1]
    watched = replace(judge, watch=seen.append)
    stored = {RESIDUAL_OUT: y} if judge.op.adds_residual else {}
    judge_forward(watched, {"y": y, **stored, **_outputs(saved), **(statistics or {})})
    vector = torch.zeros(case.sides, dtype=torch_dtype(judge.weight.name), device=device)
    names = judge.op.gradients(weight=case.weight, bias=judge.stored_bias is not None)
    of_samples = torch.zeros((case.batch, case.N), dtype=vector.dtype, device=device)
    shaped = {"dw": vector, "db": vector, DSCALE: of_samples, DSHIFT: of_samples, DRESIDUAL_GATE: of_samples}
    zeros = {name: shaped.get(name, y) for name in names}
    if not own_bits:
        judge_gradients(watched, zeros, saved, given=True)
    judge_gradients(watched, zeros, saved, given=False, own_bits=own_bits)
    return tuple(seen)


def code_expectations(judge: Judge, fmt: str) -> tuple[Expectation, ...]:
    """As ``expectations``, of an op that quantises, for codes in ``fmt``, one of ``dtypes.CODES``.

    The codes are by the reference's scale, rounded to fp32, as a kernel returns it, unless that is given.
    """
    case, device, seen = judge.case, judge.x.device, list[Expectation]()
    codes = torch.zeros((case.M, case.N), dtype=getattr(torch, CODES[fmt].torch_name), device=device)
    outputs = {Q: codes} if judge.sums is None else {Q: codes, RESIDUAL_OUT: judge.sums.stored}
    watched = replace(judge, watch=seen.append)
    if judge.given_scale is None:
        shared = "token" if judge.rules.model.scale == "any" else judge.rules.model.scale
        ones = torch.ones((case.M, scale_columns(case, shared)), device=device)
        judge_codes(watched, {**outputs, SCALE: ones})
        outputs[SCALE] = torch.cat([part.expected for part in seen if part.output == SCALE]).float()
        seen.clear()
    judge_codes(watched, outputs)
    return tuple(seen)


def _outputs(saved: Reference) -> dict[str, Tensor]:
    """The outputs that a correct kernel would save, by name."""
    outputs = {"mean": saved.mean, "rstd": saved.rstd, "bitmask": saved.bits}
    return {name: t for name, t in outputs.items() if t is not None}


def whole(parts: tuple[Expectation, ...]) -> Mapping[tuple[str, str], tuple[Tensor, Tensor, Tensor]]:
    """(output, check) -> expected, upper bound and lower bound of the error, each over all rows, in fp64."""
    blocks_of: dict[tuple[str, str], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for part in parts:
        lower = part.bound.upper if part.bound.lower is None else part.bound.lower
        both = (torch.where(torch.isnan(side), torch.inf, side) for side in (part.bound.upper, lower))
        upper, lower = (side.expand_as(part.expected) for side in both)
        blocks_of.setdefault((part.output, part.check), []).append((part.expected, upper, lower))
    return {key: _joined(blocks) for key, blocks in blocks_of.items()}


def _joined(blocks: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    expected, upper, lower = (torch.cat(column) for column in zip(*blocks, strict=True))
    return expected, upper, lower
