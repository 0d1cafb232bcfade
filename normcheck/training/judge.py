"""The process that judges for a training loop: it answers one question after another, until nobody asks any more.

It is no process of a kernel. Those come from its fork server, which stays warm between the questions; what judges stays
imported. The process that trains is left as it is: its torch, its threads, its environment and its memory.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
from dataclasses import asdict
from typing import Any, NoReturn

from normcheck.errors import itself_failed
from normcheck.isolation import forkserver


def main(number: int, device: str) -> NoReturn:
    """Say that it is ready, then answer each line of the socket with this file descriptor by a line; then end.

    A line is JSON: the fields of ``trial.Asked``, and those of ``score.Reward``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    forkserver.start_early(device)  # before anything here imports torch
    gc.disable()
    from normcheck.gate.unchanged import Files

    begun = Files.soon(("normcheck",))
    import torch

    from normcheck.training import trial

    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    forkserver.warm()
    files = begun.result()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=number).makefile("rw", encoding="utf-8") as lines:
        _say(lines, {"ready": True})
        for line in lines:
            asked = trial.Asked(**{**json.loads(line), "dtypes": tuple(json.loads(line)["dtypes"])})
            try:
                reward = trial.judged(asked)
            except Exception as error:  # normcheck's own, or the machine's: no kernel's code runs here
                reward = trial.unjudged(asked, itself_failed(error))
            touched = files.changed()
            _say(lines, asdict(trial.unjudged(asked, touched) if touched else reward))
    raise SystemExit(0)


def _say(lines: Any, answer: object) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()
