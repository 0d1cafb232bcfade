"""A case as files: what is in them is what the judge has; the page's C++ reads them; errors name the argument."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normcheck
from normcheck.bounds.export import export
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError
from tests.command_line import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "bounds-as-a-library.md").read_text(encoding="utf-8")
BYTES = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4", "fp64": "<f8"}
LINES = {
    "layernorm bf16 M=6 N=5 layout=strided gap=3 weight_dtype=fp32": {},
    "layernorm fp16 M=4 N=6 layout=trailing": {},
    "layernorm_relu_bitmask fp32 M=3 N=17 lower_clip=0.0 upper_clip=6.0": {},
    "rmsnorm fp16 M=8 N=64 layout=heads bias=none": {},
    "rmsnorm fp32 M=5 N=7 layout=dy_scalar bias=none": {},
    "rmsnorm fp16 M=0 N=6 bias=none": {},
    "fused_add_rmsnorm bf16 M=4 N=6 bias=none": {"sum": "rounded"},
    "groupnorm fp16 M=2 N=24 channels=6 groups=3": {"activation": "none"},
    "qk_norm_rope fp16 M=3 N=24 bias=none head=4 layout=strided gap=2": {"pairs": "neox", "rounding": "each"},
    "rmsnorm_modulate fp16 M=4 N=6 bias=none samples=few": {"rounding": "each", "round_factor": "io"},
}


def inputs_of(line: str) -> Inputs:
    case = parsed(line)
    return make(case, OPS[case.op], "cpu")


def read(folder: Path, entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor from the bytes of its memory, by its header alone."""
    raw = np.frombuffer((folder / f"{entry['name']}.bin").read_bytes(), BYTES[entry["dtype"]])
    assert raw.nbytes == entry["bytes"]
    strides = [stride * raw.itemsize for stride in entry["strides"]]
    return np.lib.stride_tricks.as_strided(raw, entry["shape"], strides)


@pytest.mark.parametrize("line", LINES)
def test_both_forms_have_the_inputs_and_what_the_judge_expects(line: str, tmp_path: Path) -> None:
    folder = tmp_path / "case"
    export(line, folder, LINES[line])
    header = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    dense = np.load(folder / "case.npz")
    entries = {entry["name"]: entry for entry in header["tensors"]}
    assert {path.name for path in folder.iterdir()} == {*(f"{n}.bin" for n in entries), "case.json", "case.npz"}
    for name, entry in entries.items():
        assert np.array_equal(read(folder, entry), dense[name], equal_nan=True), name
    inputs, case = inputs_of(header["case"]), parsed(line)
    for name, tensor in inputs.named():
        assert entries[name]["strides"] == list(tensor.stride()) and entries[name]["role"] == "input"
        bits = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
        assert np.array_equal(dense[name].view(bits.dtype), bits), name
        if tensor.dtype == torch.bfloat16:
            assert np.array_equal(dense[f"{name}.fp32"], tensor.float().numpy())
    if case.layout in ("heads", "trailing") or OPS[case.op].grouped or OPS[case.op].rotary:
        return  # whose shapes ``bound`` does not take
    given = dict(inputs.flat(case).named())
    clips = tuple(case.option_values.values()) or None
    found = normcheck.bound(case.op, **given, eps=case.eps, clips=clips, model=LINES[line])
    assert set(found) == set(header["outputs"])
    for output, expected in found.items():
        for role in ("value", "bound", "below"):
            mine = dense[f"{output}.{role}"]
            assert np.array_equal(mine.ravel(), getattr(expected, role).numpy().ravel()), (output, role)


def test_what_lies_between_rows_is_nan_and_a_shared_row_is_there_once(tmp_path: Path) -> None:
    export("rmsnorm fp32 M=3 N=4 layout=x_strided gap=2 bias=none", tmp_path / "a", {})
    raw = np.frombuffer((tmp_path / "a" / "x.bin").read_bytes(), "<f4")
    assert raw.size == 2 * 6 + 4 and np.isnan(raw).sum() == 4
    export("rmsnorm fp32 M=3 N=4 layout=dy_expanded bias=none", tmp_path / "b", {})
    assert (tmp_path / "b" / "dy.bin").stat().st_size == 16


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's C++, compiled with warnings as errors."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, g++ or clang++")
    (source,) = re.findall(r"^```cpp\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    folder = tmp_path_factory.mktemp("cpp")
    for name, text in {"right": source, "wrong": source.replace("1e-5f", "1e-3f")}.items():
        (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
        warnings = ("-Wall", "-Wextra", "-Werror")
        subprocess.run([compiler, "-std=c++17", *warnings, "-o", folder / name, folder / f"{name}.cpp"], check=True)
    return folder


@pytest.mark.slow
def test_the_pages_program_passes_its_case_and_fails_for_another_eps(program: Path, cli: Cli) -> None:
    (command,) = re.findall(r"^normcheck export-case '(.*?)' case_1$", PAGE, re.MULTILINE)
    done = cli("export-case", command, "case_1")
    assert (done.code, done.out) == (0, "case_1: 15 tensors; outputs rstd, y, dx, dw\n"), done.err
    right = subprocess.run([program / "right", "case_1"], capture_output=True, text=True, check=False)
    assert (right.returncode, right.stdout) == (0, "0 of 20000 elements of y are wrong\n")
    wrong = subprocess.run([program / "wrong", "case_1"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (1, "20000 of 20000 elements of y are wrong\n")


def test_the_program_says_what_has_not_the_shape_of_the_output(program: Path, cli: Cli) -> None:
    assert cli("export-case", "rmsnorm fp32 M=2 N=4 bias=none", "small").code == 0
    Path("small/y.value.bin").write_bytes(b"")
    done = subprocess.run([program / "right", "small"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "-1 of 8 elements of y are wrong\n")


@pytest.mark.parametrize(
    ("line", "model", "said"),
    [
        ("rmsnorm fp16 M=2", {}, "N is missing"),
        ("rmsnrm fp16 M=2 N=3", {}, "op='rmsnrm' in the case line"),
        ("rmsnorm_quant fp16 M=2 N=3 bias=none", {}, "op=rmsnorm_quant: expected one that returns y"),
        ("rmsnorm fp16 M=2 N=3 rows=nan bias=none", {}, "rows=nan dy=normal: expected kinds of finite numbers"),
        ("rmsnorm fp16 M=4097 N=4097 bias=none", {}, "expected M \\* N of at most 16,777,216"),
        ("fused_add_rmsnorm fp16 M=2 N=3 bias=none", {}, "leaves open what is computed: expected a model that"),
        ("rmsnorm fp16 M=2 N=3 bias=none", {"sums": 1}, "model='sums' of --model: expected one of"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    line: str, model: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        export(line, tmp_path / "case", model)
    assert not [*tmp_path.iterdir()]


def test_the_command_takes_a_model_and_refuses_a_folder_that_exists(cli: Cli) -> None:
    line = "rmsnorm_gated fp16 M=2 N=6 bias=none"
    closed = ("gate=after", "activation=silu", "rounding=once", "group=0", "round_gated=none")
    models = [word for pair in closed for word in ("--model", pair)]
    done = cli("export-case", line, "new", *models)
    assert done.code == 0, done.err
    assert json.loads(Path("new/case.json").read_text(encoding="utf-8"))["model"]["group"] == 0
    again = cli("export-case", line, "new", *models)
    assert again.code == 2 and again.err.startswith("normcheck: dir=new: exists; expected a new folder")
    bad = cli("export-case", line, "other", "--model", "gate")
    assert bad.code == 2 and bad.err.startswith("normcheck: model='gate': expected KEY=VALUE")


def test_bounds_are_positive_and_an_output_in_half_precision_has_room_for_its_rounding(tmp_path: Path) -> None:
    export("rmsnorm fp16 M=3 N=33 bias=none", tmp_path / "case", {})
    dense = np.load(tmp_path / "case" / "case.npz")
    ulp = np.spacing(dense["y.value"].astype(np.float16)).astype(float)
    assert (dense["y.bound"] >= ulp / 2 * 0.99).all() and math.isfinite(dense["y.bound"].max())
