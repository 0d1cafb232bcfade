"""The records in golden/: each still holds on this machine, whatever it was made on, and no bit of one may change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normcheck.audit.catalogue import controls
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.check import check
from normcheck.golden.judge import judge_recorded
from normcheck.golden.schema import RecordedCase
from normcheck.golden.store import read
from normcheck.golden.verify import verify_folder

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDS = sorted(path.parent for path in GOLDEN.rglob("manifest.json"))
NAMES = [str(path.relative_to(GOLDEN)) for path in RECORDS]
JUDGED = 60
"""Tensors of a record in which a bit is flipped."""


def test_they_are_there_and_small() -> None:
    assert RECORDS
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 5_300_000


SOAK = json.loads((GOLDEN / "soak.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("found", SOAK["accused"], ids=lambda found: found["case"])
def test_no_correct_kernel_that_the_soak_accused_is_accused_today(found: dict[str, str]) -> None:
    case = parsed(found["case"])
    (kernel,) = (c for c in controls() if (c.op, c.name) == (case.op, found["implementation"]))
    result = check(kernel, OPS[case.op], case, "cpu")
    assert not result.failed, found["why"]


def test_the_soak_is_as_its_page_says() -> None:
    assert (SOAK["schema"], SOAK["cases"]) == ("normcheck-soak/1", sum(piece["cases"] for piece in SOAK["pieces"]))
    accused = {(parsed(one["case"]).op, one["implementation"], parsed(one["case"]).dtype) for one in SOAK["accused"]}
    for piece in SOAK["pieces"]:
        assert {tuple(cell) for cell in piece["failed"]} <= accused
        assert all(ratio <= 1 for ratio in piece["worst"].values())
    page = (GOLDEN.parent / "docs" / "cases.md").read_text(encoding="utf-8")
    assert f"{SOAK['cases']:,} cases" in page


@pytest.mark.slow
@pytest.mark.parametrize("folder", RECORDS, ids=NAMES)
def test_it_holds(folder: Path) -> None:
    start = time.perf_counter()
    found = verify_folder(str(folder), ())
    assert found.run.exit_code == 0, found.run.messages
    assert found.checks > 5 * sum(verdict.status == "pass" for verdict in found.run.verdicts)
    assert time.perf_counter() - start < 60  # seconds on an idle machine


def flipped(tensor: Tensor, number: int, *, exponent: bool = False) -> Tensor:
    """The tensor with one bit of its ``number``-th largest element flipped: the highest of the mantissa, or of the
    exponent; a bit of a bitmask."""
    tensor = tensor.clone()
    if tensor.dtype in (torch.bool, torch.uint8):
        tensor.view(torch.uint8).view(-1)[number % tensor.numel()] ^= 1
        return tensor
    at = int(tensor.abs().flatten().argsort(descending=True)[number % tensor.numel()])
    width, mantissa = 8 * tensor.element_size(), {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[tensor.dtype]
    bit = width - 2 if exponent else mantissa - 1
    tensor.view(torch.int16 if width == 16 else torch.int32).view(-1)[at] ^= 1 << bit
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("folder", RECORDS, ids=NAMES)
def test_a_flipped_bit_is_judged_wrong(folder: Path) -> None:
    """Checksums aside. One of three elements may hang on a bit of the bitmask that is in doubt, and have no bound; and
    where the right value is 0 all digits may be noise, so that only an exponent tells."""
    record = read(folder)
    tensors = [(entry, name) for entry in record.entries for name in entry.tensors]
    noise = 0
    for entry, name in tensors[:: max(1, len(tensors) // JUDGED)]:

        def fails(changed: Tensor, entry: RecordedCase = entry, name: str = name) -> bool:
            return judge_recorded(replace(entry, tensors={**entry.tensors, name: changed}), record.device).failed

        whole = entry.tensors[name]
        if not any(fails(flipped(whole, number)) for number in range(3)):
            assert fails(flipped(whole, 0, exponent=True)), (entry.key, name)
            noise += 1
    assert noise <= len(tensors) // 20


@pytest.mark.parametrize("folder", RECORDS, ids=NAMES)
def test_its_machine_and_versions_are_known(folder: Path) -> None:
    environment = read(folder).environment
    assert {"normcheck", "python", "torch", "device"} <= set(environment)


@pytest.mark.slow
def test_no_library_is_needed() -> None:
    """A record of Triton kernels is judged where Triton cannot be imported, nor anything else that is judged."""
    missing = "; ".join(f"sys.modules[{name!r}] = None" for name in ("triton", "cudnn", "liger_kernel"))
    code = f"import sys; {missing}; from normcheck.cli.app import main; main()"
    command = [sys.executable, "-c", code, "golden", "verify", str(GOLDEN / "cpu" / "triton")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PASS" in done.stdout.splitlines()[-1]
