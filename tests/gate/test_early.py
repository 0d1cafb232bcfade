"""A slip of the pen is told at once: before torch is imported, and in the words of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = {
    "verify --op rmsnrm": "op=rmsnrm: expected one of layernorm,",
    "verify --dtype float15": "dtype=float15: expected one of fp16, bf16, fp32",
    "verify --op rmsnorm --require nobody": "require=nobody: expected one of cudnn,",
    "verify --op rmsnorm --impl torch --require triton:9": "require=triton:9: expected one of torch, which",
    "verify --impl tritn": "impl=tritn: expected a known name (cudnn,",
    "verify --impl nowhere.py --op rmsnorm": "impl=nowhere.py: no such file",
    "verify --impl nowhere.py:rmsnorm --op rmsnorm": "impl=nowhere.py: no such file",
    "verify --impl torch_native --op rmsnorm_llama": "op=rmsnorm_llama: expected one of layernorm, rmsnorm, which",
    "verify --shard 4/3": "shard=4/3: expected K/N with 1 <= K <= N <= 9999",
    "verify --report xml:x": "report=xml:x: expected FORMAT:PATH with FORMAT one of github,",
    "verify --report json:nowhere/x.json": "report=json:nowhere/x.json: expected a path of a file that can be written",
    "verify --judge nobody": "judge=nobody: expected one of fused, plain",
    "compare torch tritn": "impl=tritn: expected a known name (cudnn,",
    "compare torch nowhere.py": "impl=nowhere.py: no such file",
    "compare torch torch --profile quik": "profile=quik: expected one of quick, ci, deep",
    "compare torch torch --with /nosuch": "with=/nosuch: no such file; expected the interpreter of",
    "compare torch torch_native --op rmsnorm_llama": "op=rmsnorm_llama: expected one of layernorm, rmsnorm, which",
    "compare torch triton --report html:x": "report=html:x: expected FORMAT:PATH with FORMAT one of json",
    "reward nowhere.py --op rmsnorm": "impl=nowhere.py: no such file",
    "reward nowhere --op rmsnorm": "path=nowhere: expected FILE.py or FILE.py:NAME",
    "bench --op rmsnrm": "op=rmsnrm: expected one of layernorm,",
    "bench --impl tritn": "impl=tritn: expected a known name (cudnn,",
    "bench --sizes 4x4": "sizes=4x4: expected M,N",
    "bench --suite triton-tutorial --op rmsnorm": "op=rmsnorm: expected one of layernorm with suite=",
    "bench --report png:-": "report=png:-: expected a path",
    "bench --report json:/proc/x.json": "report=json:/proc/x.json: expected a path of a file that can be written",
    "golden record --out new --impl tritn": "impl=tritn: expected a known name (cudnn,",
    "golden record --out new --op rmsnrm": "op=rmsnrm: expected one of layernorm,",
    "golden record --out /proc/x": "out=/proc/x: expected a folder around it that is writable, /proc is not",
    "golden verify nowhere": "golden=nowhere: expected a folder of normcheck golden record",
    "golden diff nowhere nowhere": "golden=nowhere: expected a folder of normcheck golden record",
    "audit --profile quik": "profile=quik: expected one of quick, ci, deep",
}

EACH = """
import contextlib, io, json, sys
from normcheck.cli.app import main
for line in json.load(sys.stdin):
    sys.argv = ["normcheck", *line.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            print(json.dumps([line, int(end.code), said.getvalue(), "torch" in sys.modules]))
"""


@pytest.mark.slow
def test_what_needs_no_torch_to_be_seen_is_told_before_it_is_imported(tmp_path: Path) -> None:
    """One process for all of them, since none imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{EACH}"],
        input=json.dumps(list(MISTAKES)), capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in told] == list(MISTAKES)
    for line, code, said, torch in told:
        assert (line, code, torch, said.count("\n")) == (line, 2, False, 1)
        assert said.startswith(f"normcheck: {MISTAKES[line]}"), (line, said)
    assert list(tmp_path.iterdir()) == []
