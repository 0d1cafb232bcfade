"""Command ``normcheck list``: ops, implementations and reports, each with the reason if it cannot run here."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from normcheck.cases.ops import OPS
from normcheck.impls import discovery
from normcheck.impls._optional import glance
from normcheck.impls.implementation import Implementation
from normcheck.reports.report import formats
from normcheck.runner import nvidia_driver


def show(stream: TextIO) -> None:
    """Write ops, implementations and reports to ``stream``, a line each."""
    device = device_here()
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # as every command sets it that runs kernels on a CPU
    stream.write("ops\n")
    stream.writelines(f"  {op.name:<24} {op.formula}\n" for op in OPS.values())
    stream.write(f"implementations, on {device}\n")
    width = max(map(len, discovery.implementations()))
    for name, found in discovery.implementations().items():
        stream.writelines(f"  {name:<{width}} {i.op:<24} {_state(i, device)}\n" for i in found)
    stream.write("reports\n")
    stream.writelines(f"  {report.name:<24} {report.summary}\n" for report in formats().values())
    stream.write("\nNext: normcheck doctor tries what is here, and says what to do about what does not run\n")


def device_here() -> str:
    """``cuda`` if torch would see a GPU, else ``cpu``. The driver is asked, since torch takes seconds to import."""
    toolkit = _toolkit_of_torch()
    return "cpu" if toolkit is None or not nvidia_driver.devices(toolkit) else "cuda"


def _toolkit_of_torch() -> int | None:
    """The major version of the CUDA that torch is built for, from the text of its version.py.

    Its text, because importing it imports torch, and a wheel's metadata need not name the CUDA.
    None if torch is built without CUDA or is not installed; 0, for which every driver is new enough, if the text does
    not tell.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return 0
    match = re.search(r"^cuda\b[^=\n]*=\s*(?:(None)|['\"]([0-9]{1,4})\b)", text, re.MULTILINE)
    if match is None:
        return 0
    return None if match[1] else int(match[2])


def _state(implementation: Implementation, device: str) -> str:
    """Whether it runs on ``device``, else why not; if it is not in the default set, the option that names it."""
    with glance():
        reason = implementation.unavailable(device) if implementation.unavailable else None
    if reason is not None:
        return reason
    if device in implementation.by_default:
        return "runs"
    where = {"cpu": " on a CPU", "cuda": " on a GPU"}[device] if implementation.by_default else ""
    return f"runs with --impl {implementation.name}: not in the default set{where}"
