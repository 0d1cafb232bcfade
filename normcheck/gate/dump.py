"""Dump of one case: inputs, outputs, reference and bounds as safetensors, and a script of ten lines that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from normcheck.cases.dtypes import CODES
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.files import write_new
from normcheck.oracle.compare import Expectation
from normcheck.oracle.expectations import code_expectations, expectations, whole
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, GIVEN_REFERENCE, judge_of
from normcheck.oracle.judge_forward import bits_of
from normcheck.oracle.quantised import GIVEN_SCALE, OWN_SCALE

NAME = "case.safetensors"
_SLUGS = {
    END_TO_END: "end_to_end",
    GIVEN_OWN: "given_own_statistics",
    GIVEN_REFERENCE: "given_reference_statistics",
    GIVEN_SCALE: "by_given_scale",
    OWN_SCALE: "by_own_scale",
}

SCRIPT = """\
from pathlib import Path
from safetensors.torch import load_file
t = load_file(Path(__file__).with_name("case.safetensors"))  # x, weight, bias, dy; actual/, expected/, above/, below/
for name in sorted(key.removeprefix("actual/") for key in t if key.startswith("actual/") and t[key].numel()):
    actual, expected = t[f"actual/{name}"].double(), t[f"expected/{name}"]
    bound = t[f"above/{name}"].where(actual > expected, t[f"below/{name}"])
    ratio = ((actual - expected).abs() / bound).nan_to_num(nan=float("inf"))
    ratio[(actual == expected) | bound.isinf()] = 0
    at = tuple(int(i) for i in (ratio == ratio.max()).nonzero()[0])
    print(f"{name} at {at}: got {actual[at]:.9g}, expected {expected[at]:.9g}, ratio {ratio[at]:.4g}")
"""
"""Written beside the tensors. It excuses no overflow of the store: it prints ratio inf, and normcheck counts none."""


def write(folder: Path, cell: Cell, result: Result, compared: Sequence[Expectation], device: str) -> None:
    """Write ``result``, and the expectations it was compared with, into the new ``folder``. Raises UsageError."""
    from safetensors.torch import save

    held = {
        (part.output, part.check, part.first): part for part in compared
    }  # of a part that was judged twice, the last
    tensors = _tensors(cell, result, tuple(held.values()), device)
    facts = {"case": str(result.case), "implementation": cell.implementation.name, "model": str(result.model)}
    data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, metadata=facts)
    write_new(folder, {NAME: data, "worst.py": SCRIPT.encode()}, "dump")


def _tensors(cell: Cell, result: Result, held: tuple[Expectation, ...], device: str) -> dict[str, Tensor]:
    """Name in the file -> tensor. If nothing was judged, these are the expectations that would have been compared."""
    op, case = OPS[cell.op.name], result.case
    inputs = make(case, op, device)
    tensors = dict(inputs.named())
    if not held and case.M > 0:
        judge = judge_of(op, case, inputs, result.model, {})
        held = code_expectations(judge, next(iter(CODES))) if op.quantises else expectations(judge)
    for (output, check), (expected, above, below) in whole(held).items():
        name = f"{output}/{_SLUGS[check]}"
        tensors |= {f"expected/{name}": expected, f"above/{name}": above, f"below/{name}": below}
        returned = result.staged if check == GIVEN_REFERENCE else result.seen.named
        if output in returned:
            actual = returned[output]
            actual = bits_of(actual, case) if output == "bitmask" else actual
            tensors[f"actual/{name}"] = actual.reshape(expected.shape)
    if "bitmask" in result.seen.outputs:
        tensors["returned/bitmask"] = result.seen.outputs["bitmask"]
    return tensors
