"""What starts before torch is imported."""

from __future__ import annotations

from normcheck.runner import nvidia_driver


def warm(device: str, isolation: bool) -> None:
    """Let the server of worker processes import torch while this process does, where it will be needed."""
    if isolation:
        from normcheck.isolation import forkserver

        forkserver.warm(interpreted=device == "cpu" or (device == "auto" and not nvidia_driver.present()))
