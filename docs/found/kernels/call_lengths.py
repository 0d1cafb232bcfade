"""The norms by length of fla and of torch: no convention is declared."""

from importlib.util import find_spec

import torch

from normcheck import Implementation


def normalize(x, weight, bias, *, eps):
    return torch.nn.functional.normalize(x.float(), dim=-1, eps=eps).to(x.dtype)


found = [("torch_normalize", normalize)]

if find_spec("fla"):
    try:
        from fla.modules.norm.l2norm import l2_norm
    except ImportError:  # before 0.6
        from fla.modules.l2norm import l2_norm

    def of_fla(x, weight, bias, *, eps):
        return l2_norm(x, eps)

    found += [("fla_l2", of_fla)]

IMPLEMENTATIONS = tuple(Implementation(name=name, op="l2norm", forward=forward) for name, forward in found)
