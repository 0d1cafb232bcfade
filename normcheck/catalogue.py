"""``normcheck list``: what there is, and why it cannot run here."""

from __future__ import annotations

from typing import TextIO

from normcheck import discovery
from normcheck.implementation import Implementation
from normcheck.request import device_for


def show(stream: TextIO) -> None:
    """Write ops, implementations and reports to ``stream``, a line each."""
    device = device_for("auto")
    stream.write("ops\n")
    stream.writelines(f"  {op.name:<24} {op.formula}\n" for op in discovery.ops().values())
    stream.write(f"implementations, on {device}\n")
    width = max(map(len, discovery.implementations()))
    for name, found in discovery.implementations().items():
        stream.writelines(f"  {name:<{width}} {i.op:<24} {_state(i, device)}\n" for i in found)
    stream.write("reports\n")
    stream.writelines(f"  {report.name:<24} {report.summary}\n" for report in discovery.reports().values())


def _state(implementation: Implementation, device: str) -> str:
    """Whether it runs on ``device``, or why not, and whether it has to be asked for."""
    reason = implementation.unavailable(device) if implementation.unavailable else None
    if reason is not None:
        return reason
    if device in implementation.by_default:
        return "runs"
    where = {"cpu": " on a CPU", "cuda": " on a GPU"}[device] if implementation.by_default else ""
    return f"runs with --impl {implementation.name}: not in the default set{where}"
