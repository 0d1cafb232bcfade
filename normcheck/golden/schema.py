"""The data of a record: recorded cases, the tensors that they may have, and the shape and dtype of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, torch_dtype
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import DGATE, DRESIDUAL, DRESIDUAL_GATE, DSCALE, DSHIFT, RESIDUAL_OUT
from normcheck.checks.contract import Problem
from normcheck.oracle.bitmask import packed_columns
from normcheck.result import CellKey

OWN, AUTOGRAD = "own", "autograd"
"""The source of gradients: a backward of the implementation's own, or torch autograd through y."""

STATISTICS, BITMASK = "statistics", "bitmask"
"""The saved outputs of forward that a backward may read."""

GIVEN, FED = "given.", "fed."
"""Prefixes of tensor names: gradients given the reference's statistics, and the statistics that backward was fed."""


@dataclass(frozen=True, kw_only=True)
class RecordedCase:
    """One case as it ran on one implementation.

    ``backward``: OWN or AUTOGRAD. ``inputs``: name -> digest of its values. ``declared``: what the implementation
    declares about its arithmetic. ``reads``: which of STATISTICS and BITMASK its own backward reads. ``refused``: why
    the case did not run. ``gradients_refused``: why only its backward did not. ``tensors``: name -> tensor, with a
    shape and dtype of ``geometries``.
    """

    implementation: str
    case: Case
    backward: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    refused: str = ""
    gradients_refused: str = ""
    problems: tuple[Problem, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def cell(self) -> CellKey:
        """The cell of the case."""
        return CellKey(self.case.op, self.implementation, self.case.dtype)

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the case within a record: implementation and case line."""
        return self.implementation, str(self.case)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix``, under their names without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A cell of which nothing could be recorded, and why."""

    op: str
    implementation: str
    dtype: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that one run of ``golden record`` kept. ``device`` is "cpu" or "cuda"."""

    device: str
    environment: Mapping[str, str]
    entries: tuple[RecordedCase, ...]
    skipped: tuple[Skipped, ...] = ()


Geometry = tuple[torch.dtype, tuple[int, ...]]


def geometries(op: Op, case: Case) -> dict[str, tuple[Geometry, ...]]:
    """Tensor name -> the dtypes and shapes that it may have: statistics (M,), dw, db (N,), or of groups
    and of channels, all others (M, N).
    """
    io = torch_dtype(case.dtype)
    weight = torch_dtype(case.weight_format)
    rows, vector, statistic = (
        (io, (case.M, case.N)),
        (weight, (case.split.channels,)),
        (torch.float32, (case.M * case.split.groups,)),
    )
    y_dtypes = op.y_dtypes(case.dtype, case.weight_format)
    allowed: dict[str, tuple[Geometry, ...]] = {"y": tuple((torch_dtype(name), rows[1]) for name in y_dtypes)}
    for name in op.statistics:
        allowed[name] = allowed[FED + name] = (statistic,)
    if op.clamped:
        packed = (case.M, packed_columns(case.N))
        allowed["bitmask"] = ((torch.uint8, packed), (torch.bool, (case.M, case.N)))
    of_rows = {"dx": rows}
    if op.adds_residual:
        of_rows[DRESIDUAL] = residual = torch_dtype(case.residual_format), rows[1]
        allowed[RESIDUAL_OUT] = (residual,)
    if op.gated:
        of_rows[DGATE] = rows
    if op.modulated:
        of_samples = (DSCALE, DSHIFT, *[DRESIDUAL_GATE] * op.gates_residual)
        of_rows |= dict.fromkeys(of_samples, (torch_dtype(case.weight_format), (case.batch, case.N)))
    for name in owed(case):
        allowed[name] = allowed[GIVEN + name] = (of_rows.get(name, vector),)
    return allowed


def owed(case: Case) -> tuple[str, ...]:
    """The gradients that a backward must return."""
    return OPS[case.op].gradients(weight=case.weight, bias=case.bias)


def digests(inputs: Inputs) -> dict[str, str]:
    """Input -> the first 128 bits of the sha256 of its values, row by row, little endian; 32 hexadecimal digits."""
    digest_of = {}
    for name, tensor in inputs.named():
        integers = torch.int16 if tensor.element_size() == 2 else torch.int32
        values = tensor.reshape(-1, tensor.shape[-1]).contiguous().cpu().view(integers).numpy()
        digest_of[name] = hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()[:32]
    return digest_of
