"""What an exception says: a fault, a refusal of what is unusual, or a limit that the kernel states itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.checks import own_limit, refusal
from normcheck.checks.contract import Problem
from tests.case_lines import case_of
from tests.command_line import Cli, KernelFile

GOT_PAST = Path(__file__).parents[1] / "quality" / "got_past"
ONE, LIMIT = GOT_PAST / "hidden_size_one.py", GOT_PAST / "stated_limit.py"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "seed"), [("fp16", 0), ("bf16", 1), ("fp32", 2)])
def test_a_size_that_raises_is_found_though_it_came_first_with_what_is_unusual(cli: Cli, dtype: str, seed: int) -> None:
    where = ("--impl", f"{ONE}:layernorm", "--op", "layernorm", "--dtype", dtype, "--seed", str(seed))
    done = cli("verify", *where, "--max-examples", "60", "--device", "cpu", "--report", "json:r.json")
    found = json.loads(Path("r.json").read_text())["verdicts"][0]["failure"]
    assert done.code == 1 and found["kind"] == "exception" and " N=1 " in found["case"]


@pytest.mark.slow
def test_a_kernel_that_takes_no_fp32_weights_is_not_accused(cli: Cli, kernel_file: KernelFile) -> None:
    refuses = "    if weight.dtype != x.dtype: raise TypeError('dtypes differ')\n"
    refuses += "    if not x.shape[0]: raise ValueError('no rows')"
    source = LIMIT.read_text().replace("    if x.shape[-1]", f"{refuses}\n    if x.shape[-1]")
    where = ("--impl", f"{kernel_file(source)}:rmsnorm", "--op", "rmsnorm", "--dtype", "bf16", "--device", "cpu")
    done = cli("verify", *where, "--max-examples", "80", "--allow-thin", "--no-contexts")
    assert done.code == 0 and "weight_dtype=fp32" in done.out, done.out


@pytest.mark.slow
def test_a_limit_of_long_rows_that_a_kernel_states_is_told_and_is_no_finding(cli: Cli) -> None:
    where = (
        "--impl",
        f"{LIMIT}:rmsnorm",
        "--op",
        "rmsnorm",
        "--dtype",
        "fp16",
        "--device",
        "cpu",
        "--no-contexts",
        "--time-budget",
        "0.1",
        "--report",
        "json:r.json",
    )
    assert cli("verify", *where).code == 0
    (cell,) = json.loads(Path("r.json").read_text())["verdicts"]
    (told,) = [note for note in cell["notes"] if note.startswith("refuses N of ")]
    assert int(told.split()[3]) > 16384 and " and more, refused by the kernel itself in line 8 of " in told
    assert told.endswith("This norm doesn't support a feature dim of more than 32KB.")
    assert cell["status"] == "pass"


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_limit_at_sizes_of_models_is_a_finding(cli: Cli, kernel_file: KernelFile) -> None:
    path = kernel_file(LIMIT.read_text().replace("65536 // 2", "8000"))
    where = ("--impl", f"{path}:rmsnorm", "--op", "rmsnorm", "--dtype", "fp16", "--device", "cpu")
    done = cli("verify", *where)
    assert done.code == 1 and "The kernel raises this itself, in line 8" in " ".join(done.out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_limit_hides_no_fault_of_shorter_rows(cli: Cli, kernel_file: KernelFile) -> None:
    wrong = "    scale = 1.1 if x.shape[-1] > 4096 else 1.0\n    return (scale * wide"
    source = LIMIT.read_text().replace("    return (wide", wrong).replace("65536 // 2", "16384")
    where = ("--impl", f"{kernel_file(source)}:rmsnorm", "--op", "rmsnorm", "--dtype", "fp16", "--device", "cpu")
    done = cli("verify", *where)
    assert done.code == 1 and "y is wrong" in done.out


LONG, TALL, USUAL = (
    case_of(f"rmsnorm fp16 M={m} N={n} seed=1 bias=none") for m, n in ((2, 8193), (65536, 8), (65535, 8192))
)
FRAME = "/home/me/norm.py:7 in forward: raise RuntimeError(f'at most {most}')"
STATED = Problem("exception", "", "forward raised RuntimeError: at most 8192", (FRAME,))


def test_who_states_a_limit_and_of_what() -> None:
    why = "refused by the kernel itself in line 7 of /home/me/norm.py: at most 8192"
    assert refusal.refusal(LONG, STATED) == f"N above 8192, {why}"
    assert refusal.refusal(TALL, STATED) == f"M above 65535, {why}"
    assert refusal.refusal(USUAL, STATED) == ""
    assert own_limit.in_words(f"N above 8192, {why}", 9000, 8192) == f"refuses N of 9000 and more, {why}"
    assert own_limit.in_words(f"N above 8192, {why}", 9000, 16384) == f"refuses N of 9000, and not of 16384, {why}"
    assert own_limit.axis_of("N above 8192 is too much") == ""
    others = {
        "torch's": {
            "frames": ("/venv/lib/site-packages/torch/nn/functional.py:7 in f: raise RuntimeError(f'at most')",)
        },
        "not raised there": {"frames": (FRAME.replace("raise RuntimeError", "return helper"),)},
        "without a word": {"message": "forward raised RuntimeError: "},
        "another one": {"message": "forward raised KeyError: 3"},
        "a GPU that failed": {"message": "forward raised RuntimeError: CUDA error: too large"},
    }
    for name, fields in others.items():
        assert refusal.refusal(LONG, replace(STATED, **fields)) == "", name
