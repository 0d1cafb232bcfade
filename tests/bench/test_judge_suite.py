"""``normcheck bench --suite judge``: what it prints and writes, and what the docs say of its record."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.bench import judge
from normcheck.bench.judge import Rates
from normcheck.bench.options import BenchOptions
from normcheck.bench.run import bench
from normcheck.errors import UsageError
from normcheck.oracle import judging

ROOT = Path(__file__).parents[2]
RATES = Rates(
    fused=0.5, plain=6.0, inputs=0.07, isolated=100.0, in_process=60.0, overhead={"plain torch": 4.0, "triton": 1.25}
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (("layernorm_relu_bitmask", "fp16", 9, 24), ("rmsnorm_llama", "bf16", 3, 40))
    monkeypatch.setattr(judge, "POINTS", {"cpu": points})
    monkeypatch.setattr(judge, "_CHUNK_ELEMENTS", 100)  # rows of the outputs are made in chunks
    monkeypatch.setattr(judge, "_rates", lambda device, timeout: RATES)


@pytest.mark.usefixtures("few")
def test_a_table_and_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "judge.json"
    options = BenchOptions(suite="judge", device="cpu", report=(f"json:{path}",))
    assert bench(options, ("bench",)) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [cost["op"] for cost in document["costs"]] == ["layernorm_relu_bitmask", "rmsnorm_llama"]
    assert all(cost["judge"] > 0 and cost["extra"] is None for cost in document["costs"])
    assert document["small"]["isolated"] == RATES.isolated
    printed = capsys.readouterr().out
    assert "9 x 24" in printed
    assert "100 isolated, 60 in one process" in printed.replace("\n", " ")
    assert "its calls of the kernel alone: 4.0 of plain torch, 1.2 of triton." in printed.replace("\n", " ")
    assert document["small"]["overhead"] == RATES.overhead


@pytest.mark.usefixtures("few")
def test_a_judge_that_accuses_a_right_kernel_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "judge_of", lambda *a, **k: (_ for _ in ()).throw(AssertionError("judged wrong")))
    with pytest.raises(AssertionError, match="judged wrong"):
        bench(BenchOptions(suite="judge", device="cpu"), ())


def test_it_has_its_own_points() -> None:
    with pytest.raises(UsageError, match="op=rmsnorm: expected none with suite=judge"):
        bench(BenchOptions(suite="judge", device="cpu", op=("rmsnorm",)), ())


def test_small_cases_of_a_cell_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_CASES", (8, 24, 8))
    rates = (judge._cases_a_second("cpu", 60.0, isolated=False) for _ in range(5))
    assert any(rate > 0 for rate in rates)  # 16 cases more may take less time on a machine that is busy for a moment


@pytest.mark.slow
def test_the_calls_of_a_cell_are_made_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sleeps 5 ms in a call sleeps in each of a case's calls, two at least, with no cell around."""
    from normcheck.bench import plain_rmsnorm

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(0.005)
        return plain_rmsnorm.rms_norm(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(judge, "_CASES", (8, 24, 8))
    monkeypatch.setattr(plain_rmsnorm, "PLAIN", replace(plain_rmsnorm.PLAIN, forward=slow))
    assert 0.009 < judge._bare_seconds("cpu", 60.0, judge._KERNEL) < 0.1


@pytest.mark.parametrize(("name", "device"), [("judge_h200", "NVIDIA H200"), ("judge_h100", "NVIDIA H100 80GB HBM3")])
def test_the_docs_quote_the_records(name: str, device: str) -> None:
    record = json.loads((ROOT / f"golden/gpu/{name}.json").read_text(encoding="utf-8"))
    assert record["environment"]["device"] == device
    page = (ROOT / "docs/judge.md").read_text(encoding="utf-8")
    for c in record["costs"]:
        times = " | ".join(f"{c[name] / c['copy']:.1f}" for name in ("judge", "record", "inputs"))
        line = f"| {c['op']} {c['dtype']} | {c['M']} x {c['N']} | {c['copy']:.3f} | {times} | {c['extra']:.2f} |"
        assert line in page


def test_the_names_of_the_judges_are_those_of_the_option() -> None:
    from normcheck.gate.options import judges

    assert tuple(judges()) == judging.JUDGES
