"""A slip of the pen is told at once: before torch is imported, and in the words of the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from normcheck.cli.app import main
sys.argv = ["normcheck", *{words!r}]
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--op rmsnrm", "op=rmsnrm: expected one of layernorm,"),
        ("--dtype float15", "dtype=float15: expected one of fp16, bf16, fp32"),
        ("--op rmsnorm --require nobody", "require=nobody: expected one of cudnn,"),
        (
            "--op rmsnorm --impl torch --require triton:9",
            "require=triton:9: expected one of torch, which",
        ),
        ("--impl tritn", "impl=tritn: expected a known name (cudnn,"),
        ("--impl nowhere.py --op rmsnorm", "impl=nowhere.py: no such file"),
        ("--impl nowhere.py:rmsnorm --op rmsnorm", "impl=nowhere.py: no such file"),
        ("--impl torch_native --op rmsnorm_llama", "op=rmsnorm_llama: expected one of layernorm, rmsnorm, which"),
        ("--shard 4/3", "shard=4/3: expected K/N with 1 <= K <= N <= 9999"),
        ("--report xml:x", "report=xml:x: expected FORMAT:PATH with FORMAT one of github,"),
        ("--report json:nowhere/x.json", "report=json:nowhere/x.json: expected a path of a file that can be written"),
        ("--judge nobody", "judge=nobody: expected one of fused, plain"),
    ],
)
def test_what_needs_no_torch_to_be_seen_is_told_before_it_is_imported(words: str, says: str, tmp_path: Path) -> None:
    code = RUN.format(words=["verify", *words.split()])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert done.stderr.startswith(f"normcheck: {says}"), done.stderr
    assert done.stderr.count("\n") == 1
