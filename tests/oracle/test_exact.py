"""The fp64 reference against golden/exact: mpmath's numbers at 50 digits, within a few roundings of fp64.

The bound is first-order rounding analysis of the reference's own steps (Higham, Accuracy and Stability, chapter 3):
every operation errs by u = 2^-53 of its result, a sum of n terms by n u of the sum of their sizes. It has no slack to
fit: what is not conditioning is a count of operations.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.op import Op
from normcheck.golden.sealed_json import parsed
from normcheck.oracle import reference
from tests.case_lines import NORMS
from tests.oracle import make_exact

U = 2.0**-53
TINY = 2.0**-1022
EXACT = {name: op for name, op in NORMS.items() if not (op.rounds_xhat or op.adds_residual)}
"""What rounds within is rmsnorm's reference, rounded: ``test_casting.py`` holds that, ``test_residual.py`` the sums."""


@dataclass(frozen=True)
class Exact:
    """A case of a file: inputs and the outputs that are right, in fp64; ``bits`` bool (M, N) or None."""

    op: Op
    name: str
    eps: float
    options: dict[str, float]
    tensors: dict[str, Tensor]
    bits: Tensor | None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors.get("bias")


def numbers(data: Any) -> Any:
    return float.fromhex(data) if isinstance(data, str) else [numbers(item) for item in data]


def exact_cases(op: str) -> list[Exact]:
    path = make_exact.FOLDER / f"{op}.json"
    data = parsed(path.read_bytes(), str(path))
    assert (data["schema"], data["op"]) == (make_exact.SCHEMA, op)
    options = {name: float.fromhex(limit) for name, limit in data["options"].items()}
    found = []
    for case in data["cases"]:
        bits = torch.tensor(case.pop("bits")) if "bits" in case else None
        name, eps = case.pop("name"), float.fromhex(case.pop("eps"))
        tensors = {key: torch.tensor(numbers(value), dtype=torch.float64) for key, value in case.items()}
        found.append(Exact(EXACT[op], name, eps, options, tensors, bits))
    return found


CASES = [case for op in EXACT for case in exact_cases(op)]


def computed(case: Exact, ref: types.ModuleType) -> dict[str, Tensor]:
    """What ``ref``, the reference or a copy of it, gives."""
    rows = ref.normalise(case.op, case["x"], case.eps)
    scale = ref.scale(case.op, case["weight"])
    forward = ref.forward(case.op, rows, scale.g, case.bias, case.options)
    dy = case["dy"]
    found = {"rstd": rows.rstd.flatten(), "y": forward.y}
    if case.bits is not None:
        found["bits"] = ref.bits(forward.z, case.options)
        dy = dy * case.bits
    if rows.mean is not None:
        found["mean"] = rows.mean.flatten()
    backward = ref.backward(case.op, rows, scale.g, dy)
    return {**found, "dx": backward.dx, "dw": backward.dw, **({} if case.bias is None else {"db": backward.db})}


def bounds(case: Exact) -> dict[str, Tensor]:
    """What fp64 may be off, by output, from the exact statistics. Rows (M, N), statistics (M,), sums (N,)."""
    x, g = case["x"], case["weight"] + case.op.weight_offset
    (m, n), r = x.shape, case["rstd"][:, None]
    mean = case["mean"][:, None] if case.op.centered else torch.zeros(m, 1, dtype=torch.float64)
    xc = x - mean
    xh, v = xc * r, (xc * xc).mean(1, keepdim=True)
    # the second mean, of x less the first, is what the first was off by: what is left are its own roundings
    dm = (2 * U * mean.abs() + (n + 2) * U * xc.abs().mean(1, keepdim=True)) * case.op.centered
    dv = (n + 4) * U * v + dm**2
    al = 0.5 * (dv * r**2 + U) + 2 * U  # of rstd: half of v's, the addition of eps, 1 / sqrt
    dxh = r * dm + xh.abs() * (al + 2 * U)
    p = xh * g
    dz = g.abs() * dxh + 2 * U * p.abs()
    if case.bias is not None:
        dz += U * (p.abs() + case.bias.abs())
    dy = case["dy"] * (1 if case.bits is None else case.bits)
    wd = dy * g
    c1, c2 = (xh * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True) * case.op.centered
    dc1 = (wd.abs() * dxh).mean(1, keepdim=True) + (n + 3) * U * (xh * wd).abs().mean(1, keepdim=True)
    dc2 = (n + 2) * U * wd.abs().mean(1, keepdim=True) * case.op.centered
    inner = 2 * U * wd.abs() + dxh * c1.abs() + xh.abs() * dc1 + dc2 + 3 * U * (wd.abs() + (xh * c1).abs() + c2.abs())
    return {
        "mean": dm.flatten(),
        "rstd": (r * al).flatten(),
        "y": dz,
        "dx": r * inner + (al + U) * case["dx"].abs(),
        "dw": (dy.abs() * dxh).sum(0) + (m + 1) * U * (dy * xh).abs().sum(0),
        "db": m * U * dy.abs().sum(0),
    }


def ratios(case: Exact, ref: types.ModuleType = reference) -> dict[str, float]:
    """Output -> the largest error over bound; infinite for a bit that is wrong."""
    found, limit = computed(case, ref), bounds(case)
    worst = {}
    for name, actual in found.items():
        if name == "bits":
            worst[name] = 0.0 if torch.equal(actual, case.bits) else float("inf")
            continue
        error = (actual - case[name]).abs()
        rounding = U * case[name].abs()  # of the exact number, when it was stored
        ratio = float((error / (limit[name] + rounding + TINY)).nan_to_num(float("inf")).max())
        worst[name] = ratio
    return worst


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.name}-{case.name}")
def test_the_reference_is_exact_to_a_few_roundings(case: Exact) -> None:
    found = ratios(case)
    gradients = case.op.gradients(weight=True, bias=case.bias is not None)
    assert set(found) == {"y", *gradients, *case.op.statistics, *(["bits"] if case.op.clamped else [])}
    assert {name: ratio for name, ratio in found.items() if not ratio <= 1} == {}


def test_there_are_dozens_of_cases() -> None:
    assert len(CASES) == len(EXACT) * len(make_exact.HARD)
    assert set(make_exact.OPS) == set(EXACT)
    assert {path.stem for path in make_exact.FOLDER.iterdir()} == set(EXACT)


@pytest.mark.parametrize("digits", [make_exact.DIGITS, 90])
@pytest.mark.parametrize("op", EXACT)
def test_made_again_the_files_are_the_same(op: str, digits: int) -> None:
    """Also with more digits: none of these numbers is near enough to a tie to tell."""
    assert (make_exact.FOLDER / f"{op}.json").read_text(encoding="ascii") == make_exact.text_of(op, digits)


FAULTS = {
    "the mean is rounded to fp32": ("    xc = x - mean\n", "    xc = x - mean.float()\n"),
    "the variance is E[x^2] - mean^2": (
        "    var = (xc * xc).mean(1, keepdim=True)\n",
        "    var = (x * x).mean(1, keepdim=True) - mean * mean\n",
    ),
    "the variance is unbiased": (
        "(xc * xc).mean(1, keepdim=True)",
        "(xc * xc).sum(1, keepdim=True) / (x.shape[1] - 1)",
    ),
    "the variance is summed in fp32": ("(xc * xc).mean(1", "(xc * xc).float().mean(1"),
    "eps is rounded to fp32": ("(var + eps)", "(var + float(torch.tensor(eps)))"),
    "eps is outside the root": ("(var + eps).rsqrt_()", "1 / (var.sqrt() + eps)"),
    "1 is not added to the weight": ("return g + self.offset if self.offset else g", "return g"),
    "the bias is scaled": ("z = p if bias is None else p + bias", "z = p if bias is None else p + bias * (1 + 1e-14)"),
    "the bias is a thousandth if there is none": (
        "z = p if bias is None else p + bias",
        "z = p + (1e-3 if bias is None else bias)",
    ),
    "a bit is set at a limit": ('(z < options["upper_clip"])', '(z <= options["upper_clip"])'),
    "y is not clipped": ("if op.clamped else z", "if False else z"),
    "mean(wd) is left out of dx": ("torch.addcmul(c2, rows.xh, c1)", "rows.xh * c1"),
    "mean(xh * wd) has the wrong sign": ("dx = (wd - rows.xh * c1)", "dx = (wd + rows.xh * c1)"),
    "dw is a sum of dy * x": ("rows.total(dy * rows.xh)", "rows.total(dy * rows.x)"),
    "db is a sum of wd": ("rows.total(dy))", "rows.total(wd))"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_reference_is_seen(fault: str, tmp_path: Path) -> None:
    """Each in a copy of reference.py. A mean that is not compensated is none here: fp64 sums these fp32 exactly."""
    old, new = FAULTS[fault]
    source = Path(reference.__file__).read_text(encoding="utf-8")
    assert old in source
    path = tmp_path / "reference_with_a_fault.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("reference_with_a_fault", path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look their module up
    try:
        spec.loader.exec_module(copy)
        assert any(not ratio <= 1 for case in CASES for ratio in ratios(case, copy).values())
    finally:
        del sys.modules[spec.name]
