"""The recorded runs on a GPU: CI has none, so what it judges is that every cell was run there and passed."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import OPS
from normcheck.bench.speed import DIRECTIONS
from normcheck.bench.suites import SUITES
from normcheck.cases.dtypes import DTYPES
from normcheck.impls import discovery
from normcheck.oracle.residual import IN_WORDS
from tests.quality import gpu_context_kernels, gpu_contexts

RECORDED = ("cudnn", "torch", "triton")
FOLDER = Path(__file__).parents[2] / "golden" / "gpu"


def verdicts(name: str) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    run = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return run, {(v["implementation"], v["dtype"]): v for v in run["verdicts"] if v["op"] == name}


@pytest.mark.parametrize("op", OPS)
def test_every_cell_ran_on_a_gpu_and_passed(op: str) -> None:
    run, cells = verdicts(op)
    assert (run["schema"], run["profile"], run["status"], run["exit_code"]) == ("normcheck-report/1", "ci", "pass", 0)
    assert run["environment"]["device"].startswith("NVIDIA ")
    assert run["environment"]["cudnn_backend"]
    assert set(cells) == {(name, dtype) for name in RECORDED for dtype in DTYPES}
    for cell in cells.values():
        assert (cell["status"], cell["device"], cell["failure"]) == ("pass", "cuda", None)
        assert cell["cases"] > 80  # of triton: compiling takes the time, a few cases a second
        assert all(worst["ratio"] <= 1 for worst in cell["worst"].values())


def test_every_implementation_ran_on_a_gpu_none_is_thin_and_every_context_that_was_tried_held() -> None:
    """``normcheck verify`` without options on an H200 with 16 cores."""
    run = json.loads((FOLDER / "all_implementations.json").read_text(encoding="utf-8"))
    assert (run["profile"], run["status"], run["complete"]) == ("quick", "pass", True)
    assert run["seconds"] <= 2.5 * len(run["verdicts"])  # 1.8 and 2.2 on two hosts of one day
    expected = {
        (i.op, name, dtype)
        for name, own in discovery.implementations().items()
        for i in own
        for dtype in DTYPES
        if "cuda" in i.by_default
    }
    cells = {(v["op"], v["implementation"], v["dtype"]): v for v in run["verdicts"]}
    assert {*cells} == expected
    for cell in cells.values():
        assert (cell["status"], cell["device"], cell["failure"]) == ("pass", "cuda", None)
        assert cell["cases"] >= 100 and cell["shapes"] >= 6, cell
        assert all(worst["ratio"] <= 1 for worst in cell["worst"].values())
        tried = {name: how["status"] for name, how in cell["contexts"].items()}
        assert tried["again"] == "held"
        assert set(tried.values()) <= {"held", "told", "not tried"}
        assert all(how["why"] for how in cell["contexts"].values() if how["status"] != "held")
    for name in ("thread", "stream"):
        late = [how for cell in cells.values() if (how := cell["contexts"][name])["status"] != "held"]
        assert len(late) < 2 and all(how["why"].startswith("no time was left") for how in late)


def test_published_kernels_are_told_apart_by_the_sum_that_they_norm() -> None:
    """Two or more of each convention, in both dtypes; what fails rounds xhat, which is another op."""
    run = json.loads((FOLDER / "published_sums.json").read_text(encoding="utf-8"))
    assert run["environment"]["device"] == "NVIDIA H200"
    found: dict[tuple[str, str], set[str]] = {}
    for cell in run["cells"]:
        if cell["status"] == "fail":
            assert cell["implementation"] in ("conch", "flag_gems")
            continue
        for how, words in IN_WORDS.items():
            if words in cell["notes"]:
                found.setdefault((how, cell["dtype"]), set()).add(cell["implementation"])
    for dtype in ("bf16", "fp16"):
        assert found["rounded", dtype] == {"vllm", "liger"}
        assert found["exact", dtype] >= {"flashinfer", "flash_attn", "mamba", "fla"}
        assert found["mixed", dtype] == {"sglang", "flashinfer_triton"}


def test_published_gates_are_told_apart() -> None:
    """``verify --impl docs/found/kernels/call_gates.py`` on an H100, nothing declared but groups; ``told.py``."""
    run = json.loads((FOLDER / "published_gates.json").read_text(encoding="utf-8"))
    assert run["environment"]["device"].startswith("NVIDIA ")
    words = {
        "fla_silu": ("after the norm", "silu"),
        "fla_sigmoid": ("after the norm", "sigmoid"),
        "mamba_after": ("after the norm", "silu"),
        "mamba_before": ("before the norm", "silu"),
        "mamba_groups": ("before the norm", "silu"),
    }
    assert {(cell["implementation"], cell["dtype"]) for cell in run["cells"]} == set(product(words, ("bf16", "fp16")))
    for cell in run["cells"]:
        where, activation = words[cell["implementation"]]
        assert cell["status"] == "pass" and cell["cases"] >= 100
        assert any(note.startswith(f"gates {where}, as ") for note in cell["notes"])
        assert {f"gates by {activation}", "rounds y alone, as fla does"} <= {*cell["notes"]}


ROUNDS = "rounds the normed heads before it rotates them, as two kernels do"
PUBLISHED = {
    ("fused_add_layernorm_modulate", "sglang_select01"): {"computes 1 + scale in fp32"},
    ("fused_add_layernorm_modulate", "sglang_frame"): {"rounds 1 + scale to the dtype of scale"},
    ("layernorm_modulate", "diffusers"): {"rounds xhat, its product and the sum, as eager torch does"},
    ("layernorm_modulate", "transformers_omni"): {"rounds xhat, its product and the sum, as eager torch does"},
    ("layernorm_modulate", "sglang_select01"): {"rounds y alone, as a fused kernel does"},
    ("rmsnorm_modulate", "sglang_per_token"): {"rounds y alone, as a fused kernel does"},
    ("l2norm", "torch_normalize"): {
        "divides by |x|, or by eps if that is larger, as torch.nn.functional.normalize does"
    },
    ("l2norm", "fla_l2"): {"adds eps to the sum of squares, as fla does"},
    ("qk_norm_rope", "fla_neox"): {
        ROUNDS,
        "rotates column j with the one half of the rotated ones behind it, as GPT-NeoX does",
    },
    ("qk_norm_rope", "fla_interleaved"): {ROUNDS, "rotates columns 2 j and 2 j + 1, as GPT-J does"},
    ("qk_norm_rope", "diffusers_flux"): {ROUNDS, "rotates columns 2 j and 2 j + 1, as GPT-J does"},
    ("qk_norm_rope", "transformers_qwen3"): {
        "rounds xhat, its product, both products of the rotation and y, as Hugging Face does"
    },
    ("qk_norm_rope", "sglang_table"): {ROUNDS},
    ("groupnorm", "torch_native"): {"applies nothing to what it norms"},
    ("groupnorm", "torch_native_silu"): {"applies silu to what it norms"},
    ("groupnorm", "timm_silu"): {"applies silu to what it norms"},
}
"""In bf16, ``groupnorm`` in fp32: in half precision torch rounds its mean and rstd, which no convention has."""


def test_published_kernels_of_models_are_told_apart() -> None:
    """``call_conventions.py`` and ``call_lengths.py`` of docs/found/kernels, nothing declared; ``told.py``.

    Two are thin, as they refuse partial rotation together with all else.
    """
    run = json.loads((FOLDER / "published_models.json").read_text(encoding="utf-8"))
    assert run["environment"]["device"].startswith("NVIDIA ")
    cells = {(cell["op"], cell["implementation"]): cell for cell in run["cells"]}
    assert cells.keys() == PUBLISHED.keys() and len(run["cells"]) == len(cells)
    for key, words in PUBLISHED.items():
        cell = cells[key]
        is_thin = key[1] in ("transformers_qwen3", "sglang_table")
        assert cell["dtype"] == ("fp32" if key[0] == "groupnorm" else "bf16")
        assert cell["status"] == ("thin" if is_thin else "pass") and cell["cases"] >= 150
        assert words <= {*cell["notes"]}


def test_published_kernels_that_return_codes_are_told_apart() -> None:
    run = json.loads((FOLDER / "published_codes.json").read_text(encoding="utf-8"))
    assert run["environment"]["device"] == "NVIDIA H200" and {cell["status"] for cell in run["cells"]} == {
        "pass",
        "thin",
    }
    rounds = {
        "flashinfer": "quantises y in fp32, as flashinfer does",
        "vllm_static": "rounds y to the dtype of x before it quantises it, as a norm that is not fused does",
        "vllm_token": "rounds xhat, and its product with the weight, before it quantises that, as vLLM does",
    }
    for cell in run["cells"]:
        name = next((name for name in rounds if cell["implementation"].startswith(name)), "vllm_token")
        assert rounds[name] in cell["notes"], cell["implementation"]
        scaling = {"vllm_token": "divides by the scale"}.get(cell["implementation"])
        if name != "flashinfer":
            assert (scaling or "multiplies by the reciprocal of the scale") in cell["notes"]
        assert any(note.startswith("norms the sum") for note in cell["notes"]) == (cell["op"] != "rmsnorm_quant")


@pytest.mark.parametrize("op", ["rmsnorm_llama", "rmsnorm_gemma"])
def test_the_other_castings_ran_on_a_gpu_and_passed(op: str) -> None:
    run, cells = verdicts(op)
    assert (run["profile"], run["status"], run["exit_code"], run["complete"]) == ("ci", "pass", 0, True)
    names = {name for name, own in discovery.implementations().items() for i in own if i.op == op}
    names -= {"triton"} if op == "rmsnorm_llama" else set()  # came later: it is in the default run alone
    assert set(cells) == {(name, dtype) for name in names for dtype in DTYPES}
    assert all(cell["status"] == "pass" and cell["cases"] > 200 for cell in cells.values())


@pytest.mark.parametrize(("of", "device"), [("", "NVIDIA H200"), ("-h100", "NVIDIA H100 80GB HBM3")])
@pytest.mark.parametrize("name", SUITES)
def test_every_number_of_the_recorded_benches_is_of_a_verified_kernel(name: str, of: str, device: str) -> None:
    bench = json.loads((FOLDER.parent / "bench" / f"{name}{of}.json").read_text(encoding="utf-8"))
    assert (bench["schema"], bench["complete"]) == ("normcheck-bench/1", True)
    assert bench["environment"]["device"] == device
    measured = [speed for speed in bench["speeds"] if speed["status"] == "measured"]
    assert all(speed["cases"] == 3 and speed["verified_rows"] > 0 for speed in measured)
    for direction in DIRECTIONS:
        own = {s["N"] for s in measured if (s["implementation"], s["direction"]) == ("triton", direction)}
        assert own == {point.N for point in SUITES[name].points}


def test_what_cudnn_refused_is_said() -> None:
    _, cells = verdicts("layernorm_relu_bitmask")
    for dtype in ("fp16", "bf16"):
        cell = cells["cudnn", dtype]
        assert cell["not_returned"] == ["dx", "dw", "db"]
        assert any("NOT_SUPPORTED" in note for note in cell["notes"])
    assert "dx" in cells["cudnn", "fp32"]["worst"]


AUDITS = ("audit_triton", "audit_lock", "audit_sums")


@pytest.mark.parametrize("name", AUDITS)
def test_the_triton_mutants_were_killed_on_a_gpu(name: str) -> None:
    audit = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert (audit["schema"], audit["exit_code"], audit["survivors"]) == ("normcheck-audit/1", 0, [])
    assert audit["environment"]["device"].startswith("NVIDIA ")
    for entry in audit["mutants"]:
        mutant = catalogue.mutants()[entry["id"]]
        if entry["status"] == "killed":
            assert entry["kind"] in mutant.kinds
            assert entry["output"] in mutant.outputs
        else:
            assert mutant.not_exercised


KILLERS = {
    "illegal_access": ("exception", "illegal memory access"),
    "misaligned_address": ("exception", "misaligned address"),
    "device_assert": ("exception", "device-side assert"),
    "endless_kernel": ("timeout", "no result after timeout=6 s"),
    "out_of_memory": ("exception", "OutOfMemoryError"),
    "surfaces_later": ("exception", "illegal memory access"),
    "wrong_device": ("missing", "y.device=cpu"),
    "returns_early": ("not_repeatable", "still being written, by another stream"),
    "patches_synchronize": ("not_repeatable", "not the same when run again"),
    "gpu_scan_zeros": ("not_repeatable", "still being written, by another stream"),
}
RACES = ("patches_synchronize", "gpu_scan_zeros")
"""Whose faults not every smaller case shows."""
HARMLESS = ("rmsnorm", "stream_injection")
"""Innocent, and a hack whose value is right when it is looked at."""


def test_what_killers_did_on_a_gpu_was_survived_and_named() -> None:
    """``normcheck verify --impl tests/quality/gpu_killers.py --dtype fp32 --timeout 6 --max-examples 20``, by 4."""
    run = json.loads((FOLDER / "gpu_killers.json").read_text(encoding="utf-8"))
    assert run["exit_code"] == 1
    assert run["environment"]["device"].startswith("NVIDIA ")
    cells = {v["implementation"]: v for v in run["verdicts"]}
    assert set(cells) == {*KILLERS, *HARMLESS}
    for name in HARMLESS:
        assert (cells[name]["status"], cells[name]["cases"]) == ("thin", 20)  # 20 cases are no core
    for name, (kind, message) in KILLERS.items():
        failure = cells[name]["failure"]
        assert failure["kind"] == kind
        assert " M=1 " in failure["case"] or name in RACES
        assert message in failure["message"]
    # It is harmless in rows of up to 16: found in the second case, and not shrunk below 17.
    assert cells["illegal_access"]["cases"] == 2
    assert " N=17 " in cells["illegal_access"]["failure"]["case"]


def test_what_is_wrong_in_a_context_alone_was_found_on_a_gpu() -> None:
    """``python -m tests.quality.gpu_contexts golden/gpu/contexts.json`` on two GPUs or more."""
    run = json.loads((FOLDER / "contexts.json").read_text(encoding="utf-8"))
    assert (run["schema"], run["case"]) == ("normcheck-gpu-contexts/1", gpu_contexts.CASE) and run["gpus"] >= 2
    assert run["environment"]["device"].startswith("NVIDIA ")
    expected = {name: (context, output) for name, _, context, output in gpu_contexts.wrong()}
    found = {name: tuple(cell["found"]) for name, cell in run["wrong"].items()}
    assert found == {name: ("context", *where) for name, where in expected.items()}
    assert {context for context, _ in expected.values()} == {*gpu_contexts.CONTEXTS, "compile", "profiler"}
    held = {"status": "pass", "contexts": dict.fromkeys(gpu_contexts.CONTEXTS, "held")}
    assert run["right"] == dict.fromkeys(gpu_context_kernels.RIGHT, held)


def test_two_gpus_judge_as_one_does() -> None:
    """``python tests/quality/two_gpus.py``: the same verdicts, but for cases that memory was too short for."""
    run = json.loads((FOLDER / "two_gpus.json").read_text(encoding="utf-8"))
    assert run["schema"] == "normcheck-two-gpus/1"
    assert run["environment"]["device"].startswith("NVIDIA ")
    assert len(run["cells_of_each_gpu"]) == 2 and sum(run["cells_of_each_gpu"]) == run["cells"] == 48
    assert {status for _, _, _, status, *_ in run["verdicts"]} == {"pass"}
    assert all(one[:4] == two[:4] for one, two in run["differing"])
    assert run["speed_up"] == round(run["seconds"]["one"] / run["seconds"]["two"], 2) >= 1.7
    page = (FOLDER.parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert f"{run['seconds']['one']} s | {run['seconds']['two']} s, {run['speed_up']} times as fast" in page


def test_every_triton_mutant_was_run_on_a_gpu() -> None:
    runs = [json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in AUDITS]
    ran = {entry["id"] for run in runs for entry in run["mutants"]}
    assert ran == {m.id for m in catalogue.mutants().values() if m.language == "triton"}
