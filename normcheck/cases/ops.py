"""The table of ops, one row each. A new op of this family is a row here, and nothing else.

A row has all facts of its op: references and bounds, kernels and adapters, faults, recipes and benches read the facts,
not the name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from normcheck.cases.op import Op
from normcheck.cases.tensor_names import RESIDUAL, RESIDUAL_GATE

TABLE = (
    Op(
        name="layernorm",
        centered=True,
        formula="y = (x - mean) * rstd * weight (+ bias),  rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
        source="Ba, Kiros, Hinton 2016, arXiv 1607.06450; biased variance as in torch.nn.LayerNorm",
    ),
    Op(
        name="layernorm_zero_centered",
        centered=True,
        zero_centered=True,
        formula="y = (x - mean) * rstd * (1 + weight) (+ bias),  rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
        source="cuDNN frontend, LayerNorm with zero-centred gamma (from backend 9.10); "
        "dw is the gradient of weight itself",
    ),
    Op(
        name="layernorm_relu_bitmask",
        centered=True,
        clamped=True,
        formula="z = layernorm(x);  y = min(max(z, lower_clip), upper_clip);  bit = lower_clip < z < upper_clip",
        source="cuDNN frontend, LayerNorm + ReLU with bitmask (from backend 9.13); "
        "backward takes dy where the bit is set",
    ),
    Op(
        name="rmsnorm",
        centered=False,
        biases=(False, True),
        formula="y = x * rstd * weight (+ bias),  rstd = 1 / sqrt(mean(x^2) + eps)",
        source="Zhang, Sennrich 2019, arXiv 1910.07467; eps inside the root, nothing subtracted",
    ),
    Op(
        name="rmsnorm_llama",
        centered=False,
        rounds_xhat=True,
        biases=(False,),
        formula="y = weight * round(x * rstd),  round to the dtype of x,  rstd = 1 / sqrt(mean(x^2) + eps)",
        source="LlamaRMSNorm of Hugging Face transformers; the rounding passes gradients through, "
        "dw = sum_M(dy * round)",
    ),
    Op(
        name="rmsnorm_gemma",
        centered=False,
        zero_centered=True,
        biases=(False,),
        formula="y = x * rstd * (1 + weight),  rstd = 1 / sqrt(mean(x^2) + eps)",
        source="GemmaRMSNorm of Hugging Face transformers; dw is the gradient of weight itself",
    ),
)
"""The ops of one input, the plain ones first."""

FUSED_ADD = (
    Op(
        name="fused_add_rmsnorm",
        centered=False,
        adds_residual=True,
        biases=(False,),
        formula="s = x + residual;  y = s * rstd * weight,  rstd = 1 / sqrt(mean(s^2) + eps);  residual_out = s",
        source="the decoder layers of Llama, Qwen, DeepSeek, Mistral; dx = dresidual = rmsnorm's dx + dresidual_out",
    ),
    Op(
        name="fused_add_layernorm",
        centered=True,
        adds_residual=True,
        formula="s = x + residual;  y = layernorm(s);  residual_out = s",
        source="the layers of GPT-2, BERT, OPT; dx = dresidual = layernorm's dx + dresidual_out",
    ),
    Op(
        name="fused_add_rmsnorm_llama",
        centered=False,
        rounds_xhat=True,
        adds_residual=True,
        biases=(False,),
        formula="s = x + residual;  y = weight * round(s * rstd),  round to the dtype of x,  rstd of s;  "
        "residual_out = s",
        source="the decoder layers of Hugging Face's Llama, Qwen, Mistral, and Liger's default; rmsnorm_llama of the "
        "sum, which is stored as well",
    ),
    Op(
        name="fused_add_rmsnorm_gemma",
        centered=False,
        zero_centered=True,
        adds_residual=True,
        biases=(False,),
        formula="s = x + residual;  y = s * rstd * (1 + weight),  rstd = 1 / sqrt(mean(s^2) + eps);  residual_out = s",
        source="the decoder layers of Gemma, as vLLM's and flashinfer's GemmaRMSNorm fuse them; dw is the gradient of "
        "weight itself",
    ),
)
"""The ops that add a residual first."""

QUANTISED = (
    Op(
        name="rmsnorm_quant",
        centered=False,
        quantises=True,
        biases=(False,),
        formula="q = round(x * rstd * weight / scale) to e4m3fn, e5m2 or int8,  rstd = 1 / sqrt(mean(x^2) + eps)",
        source="vLLM, flashinfer, SGLang, TensorRT-LLM; scale given, or max |y| / largest code of each row or block",
    ),
    Op(
        name="fused_add_rmsnorm_quant",
        centered=False,
        adds_residual=True,
        quantises=True,
        biases=(False,),
        formula="s = x + residual;  q = round(s * rstd * weight / scale),  rstd of s;  residual_out = s",
        source="vLLM, flashinfer, SGLang, TensorRT-LLM; rmsnorm_quant of the sum, which is stored as well",
    ),
)
"""The ops that return codes."""

GATED = (
    Op(
        name="rmsnorm_gated",
        centered=False,
        gated=True,
        biases=(False,),
        formula="y = x * rstd * weight * a(gate),  or h = x * a(gate),  y = h * rstd * weight,  rstd of h;  "
        "a = silu or sigmoid",
        source="Qwen3-Next, Mamba2, Nemotron-H, fla; the mean over the row or over groups of columns, one rounding or "
        "one after each product",
    ),
)
"""The ops that multiply by an activation of a gate."""

LENGTHS = (
    Op(
        name="l2norm",
        centered=False,
        l2=True,
        biases=(False,),
        formula="y = x * rstd,  rstd = 1 / sqrt(sum(x^2) + eps),  or 1 / sqrt(sum(x^2) + N eps),  "
        "or 1 / max(sqrt(sum(x^2)), eps)",
        source="fla, Qwen3-Next (the sum), mlx-lm (the mean), torch.nn.functional.normalize (the larger of the two)",
    ),
)
"""The ops that divide by the length of x."""

MODULATED = (
    Op(
        name="layernorm_modulate",
        centered=True,
        modulated=True,
        biases=(False,),
        formula="y = (x - mean) * rstd * (1 + scale) + shift,  scale and shift of each sample",
        source="AdaLN of DiT, Peebles, Xie 2023, arXiv 2212.09748: the front of each block of SD3, Flux, Wan; "
        "dscale = sum_S(dy * xhat), dshift = sum_S(dy)",
    ),
    Op(
        name="rmsnorm_modulate",
        centered=False,
        modulated=True,
        biases=(False,),
        formula="y = x * rstd * (1 + scale) + shift,  scale and shift of each sample",
        source="AdaLN of an RMSNorm, as Lumina, Mochi and LTX have it; dscale = sum_S(dy * xhat), dshift = sum_S(dy)",
    ),
)
"""The ops that multiply and add what each sample of a batch has of its own."""

MODULATED_ADD = (
    Op(
        name="fused_add_layernorm_modulate",
        centered=True,
        adds_residual=True,
        modulated=True,
        biases=(False,),
        formula="s = residual + residual_gate * x;  y = layernorm(s) * (1 + scale) + shift,  residual_gate, scale and "
        "shift of each sample;  residual_out = s",
        source="the second half of a block of DiT, SD3, Flux, Wan: x is what attention returned; "
        "dresidual = layernorm's dx + dresidual_out, dx = residual_gate * dresidual, "
        "dresidual_gate = sum_S(dresidual * x)",
    ),
    Op(
        name="fused_add_rmsnorm_modulate",
        centered=False,
        adds_residual=True,
        modulated=True,
        biases=(False,),
        formula="s = residual + residual_gate * x;  y = s * rstd * (1 + scale) + shift,  residual_gate, scale and "
        "shift of each sample;  residual_out = s",
        source="the same with an RMSNorm, as Lumina, Mochi and LTX have it",
    ),
)
"""The ops that add x to a residual, times a gate of each sample, and modulate the norm of the sum."""

GROUPED = (
    Op(
        name="groupnorm",
        centered=True,
        grouped=True,
        formula="y = a((x - mean) * rstd * weight + bias),  mean and rstd over each group of channels of a sample;  "
        "weight and bias of each channel;  a = identity or silu",
        source="Wu, He 2018, arXiv 1803.08494; one group is a LayerNorm over C and L, C groups an InstanceNorm; "
        "dw = sum_BL(dz * xhat), db = sum_BL(dz)",
    ),
)
"""The ops that norm groups of channels."""

ROTARY = (
    Op(
        name="qk_norm_rope",
        centered=False,
        rotary=True,
        biases=(False,),
        formula="of each head of q and k: n = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps) over the head;  "
        "y_a = n_a * cos - n_b * sin,  y_b = n_b * cos + n_a * sin  for each pair a, b of its first columns, "
        "y = n in the rest;  y = x in the heads of v",
        source="the attention of Qwen3, Gemma3 and OLMo2, fused in vLLM, SGLang, TensorRT-LLM and flashinfer; "
        "dx alone of its gradients",
    ),
)
"""The ops that norm and rotate heads."""

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for table in (TABLE, FUSED_ADD, QUANTISED, GATED, LENGTHS, MODULATED, MODULATED_ADD, GROUPED, ROTARY)
        for op in sorted(table, key=lambda op: op.name)
    }
)
"""Name -> op, in alphabetical order, those of one input first."""


def with_residual(op: str, named: Collection[str]) -> str:
    """``op``, or the one that also adds a residual if a kernel of a modulated ``op`` takes one, or its gate, by name.

    ``named``: what the kernel must be given by name.
    """
    fused = f"fused_add_{op}"
    return fused if {RESIDUAL, RESIDUAL_GATE} & {*named} and fused in OPS and OPS[fused].gates_residual else op


def names_of(holds: Callable[[Op], bool]) -> tuple[str, ...]:
    """The names of the ops of one input for which ``holds`` is true, in the order of the table."""
    return tuple(op.name for op in TABLE if holds(op))
