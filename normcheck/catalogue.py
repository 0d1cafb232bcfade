"""``normcheck list``: what there is, and why it cannot run here."""

from __future__ import annotations

from typing import TextIO

from normcheck import discovery
from normcheck.request import device_for


def show(stream: TextIO) -> None:
    """Write ops, implementations and reports to ``stream``, a line each."""
    device = device_for("auto")
    stream.write("ops\n")
    stream.writelines(f"  {op.name:<24} {op.formula}\n" for op in discovery.ops().values())
    stream.write(f"implementations, on {device}\n")
    for name, found in discovery.implementations().items():
        for implementation in found:
            reason = implementation.unavailable(device) if implementation.unavailable else None
            stream.write(f"  {name:<8} {implementation.op:<24} {'runs' if reason is None else reason}\n")
    stream.write("reports\n")
    stream.writelines(f"  {report.name:<24} {report.summary}\n" for report in discovery.reports().values())
