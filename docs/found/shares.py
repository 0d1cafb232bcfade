"""What of a machine each of several jobs has, so that none of them waits for the cores of another."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from queue import SimpleQueue


@dataclass(frozen=True)
class Share:
    """What of the machine one of several jobs has: these cores, and all GPUs, of which it takes the first ones."""

    cores: frozenset[int]
    gpus: tuple[str, ...]

    @property
    def with_one_gpu(self) -> Share:
        """The same, without a GPU that is not the current one: a kernel that does not care for that is right there."""
        return replace(self, gpus=self.gpus[:1])


def shares(jobs: int) -> SimpleQueue[Share]:
    """The shares of so many jobs, each for one of them at a time: as many cores as fit, and another GPU to begin at."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = tuple(filter(None, visible.split(",")))
    each, queue = max(1, len(cores) // jobs), SimpleQueue[Share]()
    for job in range(jobs):
        begin, first = job * each % len(cores), job % max(1, len(gpus))
        queue.put(Share(frozenset(cores[begin : begin + each]), gpus[first:] + gpus[:first]))
    return queue
