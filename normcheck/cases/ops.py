"""The table of ops, one row each. A new op of this family is a row here, and nothing else.

A row has all facts of its op: references and bounds, kernels and adapters, faults, recipes and benches read the facts,
not the name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

STATISTICS = ("mean", "rstd")
"""The statistics that a forward may save for a backward, each (M,)."""

GRADIENTS = ("dx", "dw", "db")
"""The gradients that a backward returns, dw only with a weight, db only with a bias."""

RESIDUAL, RESIDUAL_OUT, DRESIDUAL = "residual", "residual_out", "dresidual"
"""The input that an op adds to x, the sum that it stores, and the gradient of the input."""

GATE, DGATE = "gate", "dgate"
"""The input whose activation a gated op multiplies by, and its gradient."""

CODES, SCALE = "q", "scale"
"""The codes that a quantising op returns in place of y, and what they are multiples of, unless it is given."""

SHIFT, DSCALE, DSHIFT = "shift", "dscale", "dshift"
"""What a modulated op adds, beside the SCALE that it multiplies by and 1, and the gradients of the two."""

RESIDUAL_GATE, DRESIDUAL_GATE = "residual_gate", "dresidual_gate"
"""What each sample multiplies x by before a modulated op adds it to the residual, and its gradient."""

GROUPS = "groups"
"""The number that a grouped op gets by name: how many groups of channels there are, each normed by itself."""

COS, SIN, Q_WEIGHT, K_WEIGHT = "cos", "sin", "q_weight", "k_weight"
"""What a rotary op gets: the cosine and the sine of each token and pair of columns, the weights of the heads of q and
of k."""

HEAD_COUNTS = ("q_heads", "k_heads")
"""The numbers that a rotary op gets by name: how many heads of a row are of q, and how many behind those of k."""

BLOCKS: Mapping[str, int] = MappingProxyType({"block64": 64, "block128": 128})
"""What shares a scale, if a block of columns does, as a model's ``scale`` -> the columns of a block."""

BY_NAME: Mapping[str, str] = MappingProxyType(
    {RESIDUAL: DRESIDUAL, RESIDUAL_GATE: DRESIDUAL_GATE, GATE: DGATE, SCALE: DSCALE, SHIFT: DSHIFT}
    | dict.fromkeys((COS, SIN, Q_WEIGHT, K_WEIGHT), "")
)
"""Every input that a function gets by name -> its gradient, "" if none is asked. The scale of codes has none."""

OF_SAMPLES = (DRESIDUAL_GATE, DSCALE, DSHIFT)
"""The gradients of what each sample has of its own, each (B, N)."""

ROOT_FIRST = (
    RESIDUAL_OUT,
    *STATISTICS,
    "y",
    SCALE,
    CODES,
    "bitmask",
    "dx",
    DRESIDUAL,
    DRESIDUAL_GATE,
    DGATE,
    DSCALE,
    DSHIFT,
    "dw",
    "db",
)
"""Every output in the order in which they are computed: the first wrong one is the root of the others."""

RELU6 = (0.0, 6.0)
"""The default limits of a clamped op."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """A normalisation of the rows of x (M, N).

        v = mean((x - mean)^2) (biased), or mean(x^2) if not ``centered``
        xhat = (x - mean) / sqrt(v + eps), rounded to the dtype of x if ``rounds_xhat``
        z = xhat * gamma + bias, gamma = weight, or 1 + weight if ``zero_centered``
        y = z, or clip(z, lower_clip, upper_clip) if ``clamped``; the bit of y is lower_clip < z < upper_clip

    ``biases``: the values that ``Case.bias`` may have, the usual one first. ``formula`` and ``source`` are for readers.

    If it ``adds_residual``, x above is x + residual, which ``oracle/residual.py`` explains; that sum is an output as
    well, and its cotangent is added to dx, which is the gradient of the residual too.

    If it ``quantises``, its output is not y but q, y / scale rounded to codes of 8 bits, which
    ``oracle/quantised.py`` explains. Such an op has no gradients.

    If it is ``gated``, it also multiplies by an activation of a gate (M, N), which ``oracle/gated.py`` explains: when,
    which one, and in which groups of columns the mean is taken, is a convention.

    If it is ``l2``, it divides by the length of x in place of the root of a mean, which ``oracle/l2norm.py`` explains:
    what eps does is a convention. It has no weight.

    If it is ``modulated``, x is (B, S, N), and each of its B samples has a scale and a shift (N,) of its own, in place
    of weight and bias: y = xhat * (1 + scale) + shift, which ``oracle/modulated.py`` explains. One that adds a residual
    norms residual + residual_gate * x, with a gate (N,) of each sample, which ``oracle/gated_sum.py`` explains.

    If it is ``grouped``, x is (B, C, L), so M = B and N = C * L, and it norms each group of channels of a sample, with
    weight and bias (C,), which ``oracle/grouped.py`` explains: an activation behind it is a convention.

    If it is ``rotary``, a row is a token's heads of q, of k and of v; it norms each head of q and of k, with a weight
    of q and one of k, and rotates pairs of their columns, which ``oracle/rotary.py`` explains: which are a pair, and
    what is rounded, are conventions. Of its gradients dx alone is asked.

    The rounding of xhat, to the dtype of x with a residual as well, passes gradients through unchanged. Raises
    ValueError for an op that rounds xhat and is centred, zero-centred, clamped, biased or quantises, and for one that
    is clamped and adds a residual or quantises, or that is gated, l2, modulated, grouped or rotary and not plain: no
    bound is derived.
    """

    name: str
    centered: bool
    zero_centered: bool = False
    clamped: bool = False
    rounds_xhat: bool = False
    adds_residual: bool = False
    quantises: bool = False
    gated: bool = False
    l2: bool = False
    modulated: bool = False
    grouped: bool = False
    rotary: bool = False
    biases: tuple[bool, ...] = (True, False)
    formula: str
    source: str

    def __post_init__(self) -> None:
        more = (self.centered, self.zero_centered, self.clamped, self.takes_bias, self.quantises)
        if self.rounds_xhat and any(more):
            raise ValueError(
                f"op={self.name}: expected rounds_xhat=True with no centered, zero_centered, clamped, bias, quantises"
            )
        if self.clamped and (self.adds_residual or self.quantises):
            raise ValueError(f"op={self.name}: expected clamped=True with no adds_residual, quantises")
        if self.gated and (any(more) or self.zero_centered or self.rounds_xhat or self.adds_residual):
            raise ValueError(f"op={self.name}: expected gated=True with no other fact of it")
        if self.l2 and (any(more) or self.zero_centered or self.rounds_xhat or self.by_name):
            raise ValueError(f"op={self.name}: expected l2=True with no other fact of it")
        if self.modulated and (any(more[1:]) or self.gated or self.rounds_xhat):
            facts = "centered and adds_residual"
            raise ValueError(f"op={self.name}: expected modulated=True with no other fact of it but {facts}")
        if self.grouped and (self.zero_centered or self.clamped or self.rounds_xhat or self.l2 or self.by_name):
            raise ValueError(f"op={self.name}: expected grouped=True with no other fact of it but centered and a bias")
        plain = not (any(more) or self.zero_centered or self.rounds_xhat or self.l2 or self.grouped or self.modulated)
        if self.rotary and not (plain and not self.gated and not self.adds_residual):
            raise ValueError(f"op={self.name}: expected rotary=True with no other fact of it")

    @property
    def takes_bias(self) -> bool:
        """Whether the op may be called with a bias."""
        return True in self.biases

    def weights_of(self, declared: tuple[bool, ...]) -> tuple[bool, ...]:
        """The values of ``Case.weight``: those ``declared``; False of a norm by length, True of one whose weights have
        names of their own.
        """
        return (False,) if self.l2 else (True,) if self.modulated or self.rotary else declared

    @property
    def of_models(self) -> bool:
        """Whether the op is an RMSNorm as language models write it: no bias, no clip, and a casting of its own."""
        return not (self.centered or self.clamped or self.takes_bias or self.by_name)

    @property
    def of_row_groups(self) -> bool:
        """Whether groups of rows may each have a weight: the op has one, for each column, and gets nothing by name."""
        return not (self.by_name or self.l2 or self.grouped)

    @property
    def by_name(self) -> tuple[str, ...]:
        """The inputs of BY_NAME that the op has."""
        has = {RESIDUAL: self.adds_residual, GATE: self.gated, SCALE: self.quantises or self.modulated}
        has |= {SHIFT: self.modulated, RESIDUAL_GATE: self.gates_residual}
        has |= dict.fromkeys((COS, SIN, Q_WEIGHT, K_WEIGHT), self.rotary)
        return tuple(name for name in BY_NAME if has[name])

    @property
    def gates_residual(self) -> bool:
        """Whether what the op adds to the residual is x times a gate of each sample."""
        return self.modulated and self.adds_residual

    @property
    def counts(self) -> tuple[str, ...]:
        """The numbers that a function of the op gets by name, as it gets tensors."""
        return (GROUPS,) * self.grouped + HEAD_COUNTS * self.rotary

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a case that the op has and others have not."""
        return tuple(axis for name in (*self.by_name, GROUPS) for axis in self.axes_of(name))

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Those of ``axes`` that say something of this input; () if the op has no such input, or its ``weights`` do."""
        has = (*self.by_name, *[GROUPS] * self.grouped)
        own = name in has and not (self.modulated and name == SCALE)
        return AXES_OF[name] if own else ()

    @property
    def main_output(self) -> str:
        """The output that every forward must return."""
        return CODES if self.quantises else "y"

    @property
    def weight_offset(self) -> float:
        """The number that is added to the weight."""
        return 1.0 if self.zero_centered or self.modulated else 0.0

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that forward saves for backward."""
        return STATISTICS if self.centered else STATISTICS[1:]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that forward may return, ``main_output`` first."""
        residual = (RESIDUAL_OUT,) if self.adds_residual else ()
        if self.quantises:
            return (CODES, SCALE, *residual)
        return ("y", *residual, *self.statistics, *(("bitmask",) if self.clamped else ()))

    def gradients(self, *, weight: bool, bias: bool) -> tuple[str, ...]:
        """The gradients that a backward returns, if the op is called with a weight, and a bias, or without."""
        if self.quantises:
            return ()
        named = filter(None, (BY_NAME[name] for name in self.by_name))
        if self.modulated or self.rotary:
            return ("dx", *named)
        return ("dx", *named, *GRADIENTS[1:2] * weight, *GRADIENTS[2:] * bias)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the op's own numbers, which forward and backward get by keyword."""
        return ("lower_clip", "upper_clip") if self.clamped else ()

    def clips(self, limits: Sequence[float]) -> tuple[tuple[str, float], ...]:
        """``limits``, lower and upper, as ``Case.options``; () if the op is not clamped."""
        return tuple(zip(self.options, limits, strict=self.clamped))

    def y_dtypes(self, io: str, weight: str) -> tuple[str, ...]:
        """The names of the dtypes that y may have, for x in ``io`` and the weight in ``weight``.

        A rounded xhat times a wider weight has the wider dtype by promotion, and LlamaRMSNorm returns that; the dtype
        of x is right as well, and so of a gated or a modulated op. Any other op stores y in the dtype of x.
        """
        return (io, weight) if (self.rounds_xhat or self.gated or self.modulated) and weight != io else (io,)


AXES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {RESIDUAL: (RESIDUAL, "residual_dtype"), RESIDUAL_GATE: (), GATE: (GATE,), SCALE: (SCALE,), SHIFT: ("samples",)}
    | {GROUPS: ("channels", "groups")}
    | {COS: ("head", "kv_heads", "rotary", "angles"), SIN: (), Q_WEIGHT: (), K_WEIGHT: ()}
)
"""Each input of BY_NAME, and GROUPS -> the axes of a case that say something of it."""

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
