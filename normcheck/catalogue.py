"""``normcheck list``: what there is, and why it cannot run here."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from normcheck import discovery, driver
from normcheck.implementation import Implementation


def show(stream: TextIO) -> None:
    """Write ops, implementations and reports to ``stream``, a line each."""
    device = device_here()
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # as every command has it that runs kernels there
    stream.write("ops\n")
    stream.writelines(f"  {op.name:<24} {op.formula}\n" for op in discovery.ops().values())
    stream.write(f"implementations, on {device}\n")
    width = max(map(len, discovery.implementations()))
    for name, found in discovery.implementations().items():
        stream.writelines(f"  {name:<{width}} {i.op:<24} {_state(i, device)}\n" for i in found)
    stream.write("reports\n")
    stream.writelines(f"  {report.name:<24} {report.summary}\n" for report in discovery.reports().values())
    stream.write("\nNext: normcheck doctor tries what is here, and says what to do about what does not run\n")


def device_here() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``. torch is imported only where it might: where there is a driver,
    no GPU is hidden, and torch is built for CUDA, as its files say.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or not driver.present() or not _torch_has_cuda():
        return "cpu"
    from normcheck.environment import device_of

    return device_of("auto")


def _torch_has_cuda() -> bool:
    """Whether torch is built for CUDA, or HIP, from the text of its version.py; True where that cannot be told."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    said = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return not said or any(value.strip() != "None" for value in said)


def _state(implementation: Implementation, device: str) -> str:
    """Whether it runs on ``device``, or why not, and whether it has to be asked for."""
    reason = implementation.unavailable(device) if implementation.unavailable else None
    if reason is not None:
        return reason
    if device in implementation.by_default:
        return "runs"
    where = {"cpu": " on a CPU", "cuda": " on a GPU"}[device] if implementation.by_default else ""
    return f"runs with --impl {implementation.name}: not in the default set{where}"
