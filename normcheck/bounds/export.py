"""``normcheck export-case``: a case as files, for tests in C++ and other languages: inputs, expected values, bounds.

Every tensor is there twice: in ``case.npz``, dense, and as the bytes of its memory in ``NAME.bin``, which the header
``case.json`` describes. The header has one line a tensor, always of one form, so that a reader needs no JSON library.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normcheck.bounds.expected import parts_of
from normcheck.bounds.given import Given, closed
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import format_of, make
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import OF_SAMPLES, STATISTICS
from normcheck.errors import UsageError, one_line
from normcheck.files import refuse_existing, write_new
from normcheck.oracle.compare import Expectation
from normcheck.oracle.conventions import keys
from normcheck.oracle.expectations import whole
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import declared_model, table

MOST_ELEMENTS = 2**24
"""The largest M * N that is exported: each of its outputs has three tensors of it in fp64, 400 MB together."""


@dataclass(frozen=True)
class Exported:
    """One tensor of the folder, with its ``role``: an input, or the value, the bound or the bound below of an output.

    ``dtype``: a name of ``FORMATS``; ``tensor``: on the CPU, with the strides that the case gives it.
    """

    name: str
    role: str
    tensor: Tensor

    @property
    def dtype(self) -> str:
        """The name of its format."""
        return format_of(self.tensor.dtype).name

    @property
    def memory(self) -> bytes:
        """From its first element to its last, little-endian; what lies between rows is NaN."""
        t = self.tensor
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        return bytes(_little(t.as_strided((reach,), (1,))).tobytes())


def export(line: str, folder: Path, model: Mapping[str, Any]) -> tuple[Exported, ...]:
    """Write the case of ``line`` into the new ``folder``; returns the tensors that are in it.

    ``model``: what a kernel declares, as in an ``Implementation``. Raises UsageError, also if the case has numbers that
    are not finite, if its op returns codes, and if it leaves open what is computed and ``model`` does not say it.
    """
    refuse_existing(folder, "dir")
    about = _given(line, model)
    tensors = (*_inputs(about), *_expected(about))
    memory = {each.name: each.memory for each in tensors}
    header = _header(about, [_entry(each, len(memory[each.name])) for each in tensors])
    files = {f"{name}.bin": data for name, data in memory.items()}
    write_new(folder, {**files, "case.json": header.encode(), "case.npz": _npz(tensors)}, "dir")
    return tensors


def _given(line: str, model: Mapping[str, Any]) -> Given:
    """The case of ``line`` with its tensors on the CPU."""
    case = parsed(line)
    op = OPS[case.op]
    if op.quantises:
        raise UsageError(f"op={case.op}: expected one that returns y; codes are judged by normcheck verify")
    if is_special(case):
        kinds = f"rows={case.rows} dy={case.dy}" + f" gate={case.gate}" * op.gated
        raise UsageError(f"{kinds}: expected kinds of finite numbers; normcheck verify judges NaN and infinities")

    if case.M * case.N > MOST_ELEMENTS:
        expected = f"M * N of at most {MOST_ELEMENTS:,}, as each element takes some hundred bytes"
        raise UsageError(f"case={one_line(line, 200)}: expected {expected}")
    base = declared_model(table().model, model, "--model")
    inputs = make(case, op, "cpu")
    return Given(op, case, inputs, closed(op, case, base), tuple(inputs.x.shape))


def _inputs(about: Given) -> Iterator[Exported]:
    for name, tensor in about.inputs.named():
        yield Exported(name, "input", tensor)


def _expected(about: Given) -> Iterator[Exported]:
    """Value, bound and bound below of each output, all in fp64."""
    for (output, _), sides in whole(parts_of(about, gradients=True)).items():
        for role, side in zip(("value", "bound", "below"), sides, strict=True):
            yield Exported(f"{output}.{role}", role, side.reshape(_shape(about.case, output)).contiguous())


def _shape(case: Case, output: str) -> tuple[int, ...]:
    """The shape of an output; statistics, which may have any, are (M,), or (M, groups)."""
    if output in STATISTICS:
        return (case.M, -1) if case.M else (0,)
    if output in ("dw", "db"):
        return case.sides
    return (case.batch, case.N) if output in OF_SAMPLES else case.shape


def _little(dense: Tensor) -> np.ndarray[Any, Any]:
    """A dense tensor as an array, little-endian; bf16, which numpy lacks, by its bits in uint16."""
    if dense.dtype == torch.bfloat16:
        return np.asarray(dense.view(torch.int16).numpy()).view(np.uint16).astype("<u2", copy=False)
    array = np.asarray(dense.numpy())
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _npz(tensors: tuple[Exported, ...]) -> bytes:
    """All tensors, dense. One of bf16 is there by its bits, and as ``NAME.fp32`` by its values."""
    arrays = {each.name: _little(each.tensor.contiguous()) for each in tensors}
    wide = {f"{each.name}.fp32": _little(each.tensor.float().contiguous()) for each in tensors if each.dtype == "bf16"}
    stream = io.BytesIO()
    np.savez(stream, **{**arrays, **wide})  # type: ignore[arg-type]
    return stream.getvalue()


def _header(about: Given, entries: Sequence[Mapping[str, Any]]) -> str:
    """The facts of a case, and its tensors, a line each."""
    case = about.case
    facts = {
        "schema": "normcheck-case/1",
        "case": str(case),
        "op": case.op,
        "M": case.M,
        "N": case.N,
        "eps": case.eps,
        "options": dict(case.option_values),
        "model": {key: getattr(about.model, key) for key in keys(about.op)},
        "outputs": {part.output: _stored(part) for part in parts_of(about, gradients=True)},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in facts.items()]
    tensors = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    return "\n".join(["{", *lines, '  "tensors": [', tensors, "  ]", "}", ""])


def _stored(part: Expectation) -> str:
    """The dtype of an output."""
    return "bool" if part.output == "bitmask" else part.fmt.name


def _entry(each: Exported, size: int) -> dict[str, Any]:
    """A tensor's line of the header; strides are in elements."""
    t = each.tensor
    whole_of = {"shape": list(t.shape), "strides": list(t.stride()), "bytes": size}
    return {"name": each.name, "role": each.role, "dtype": each.dtype, **whole_of}
