"""cuDNN as torch's operators: what normcheck hands to them, and when they cannot be used."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normcheck
from normcheck.cases.case_line import parsed
from normcheck.impls import cudnn
from normcheck.impls.cudnn_ops import IMPLEMENTATIONS

BY_OP = {implementation.op: implementation for implementation in IMPLEMENTATIONS}
LINE = "{op} fp16 M={m} N=33 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0"


def test_reading_what_it_is_imports_neither_torch_nor_cudnn() -> None:
    code = "import sys, normcheck.impls.cudnn_ops; print(sorted({'torch', 'cudnn'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("op", BY_OP)
def test_each_argument_arrives_where_it_belongs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Any, ...]] = []
    both = dict.fromkeys(("layer_norm", "rms_norm"), lambda *given: called.append(given))
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cudnn.experimental", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cudnn.experimental.ops", SimpleNamespace(**both))
    x, weight, bias = torch.ones(2, 3, 5), torch.ones(5), torch.zeros(5)
    BY_OP[op].forward(x, weight, bias, eps=0.25)
    assert called == [(x, (5,), weight, bias, 0.25) if op == "layernorm" else (x, weight, bias, 0.25)]


@pytest.mark.parametrize("op", BY_OP)
def test_no_rows_are_refused(op: str) -> None:
    supports = BY_OP[op].supports
    assert supports is not None and supports(parsed(LINE.format(op=op, m=1))) is None
    assert supports(parsed(LINE.format(op=op, m=0))) == "cuDNN's operators take no input of no rows"


def test_where_they_cannot_be_used_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable = BY_OP["rmsnorm"].unavailable
    assert unavailable is not None and unavailable("cpu") == "cuDNN needs an NVIDIA GPU"
    monkeypatch.setattr(cudnn, "unavailable", lambda op, oldest, device: None)
    monkeypatch.setitem(sys.modules, "cudnn.ops.norm.layernorm", None)
    assert "whose cudnn.experimental.ops has norms from 1.32 on, is installed but" in str(unavailable("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
@pytest.mark.parametrize("op", BY_OP)
def test_they_are_right_on_a_gpu(op: str) -> None:
    (verdict,) = normcheck.verify(BY_OP[op], case=LINE.format(op=op, m=40))
    assert verdict.status == "pass"
