"""The packages that were run, with their versions, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One file of a public repository: from ``url``, of this SHA-256, saved as ``name`` up to the line ``until``.

    What comes after that line is its author's test, which would run as the file is imported.
    """

    name: str
    url: str
    sha256: str
    until: str = ""


@dataclass(frozen=True)
class Package:
    """A package in one version, the adapter of ``kernels/`` that calls it, and what pip is to install for it.

    ``beside``: what it imports and torch does not bring. ``needs``: with all that this requires, or the package itself,
    which is not torch. ``source``: pip's requirement is unpacked, not built.
    ``environment``: variables of that.
    """

    name: str
    version: str
    adapter: str
    requirement: str = ""
    beside: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    source: bool = False
    needs: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Its name in the records, and its folder of the cache."""
        return f"{self.name}-{self.version}"

    @property
    def pinned(self) -> str:
        """What pip is asked for."""
        return f"{self.requirement or self.name}=={self.version}"


def _raw(repository: str, commit: str, folder: str, into: str, until: str, files: dict[str, str]) -> tuple[File, ...]:
    """Files of ``folder`` of a repository at a commit, saved to ``into``: their names and digests."""
    base = f"https://raw.githubusercontent.com/{repository}/{commit}/{folder}"
    return tuple(File(f"{into}{name}", f"{base}/{name}", digest, until) for name, digest in files.items())


_ATTORCH = _raw(
    "BobMcDear/attorch",
    "67c2772baf33913ef51c2d1064f746ca17b63749",
    "attorch",
    "attorch/",
    "",
    {
        "act_kernels.py": "81afd2f74f256d89cfa588cd4bcda9583899770b1cf7a2b49b1f52f76b3632d4",
        "layer_norm_kernels.py": "bd5d3f09a691e73b2dc704f9fb220d80f538ad74ea2064a45cb4d8f98ccc693b",
        "layer_norm_layer.py": "3b77366eb899e06cb89500520da9e5abed5e7736b69e4a88402fafbd1518a44a",
        "rms_norm_kernels.py": "ba4cccf1995ea0a4bfb2cf99156130119a963c7f79d25d3e532cad098bcb10a1",
        "rms_norm_layer.py": "46e23a3fbf3a667a6486aedf2b878bba7d26fa20c8c3dc0c4d0d39eecc46da1f",
        "softmax_kernels.py": "6d8eff0311c22bb5e5ab7e438e8a7b16edf906b8845d825908a31f29e6275458",
        "types.py": "bd1b561221a816b276f00aa8bbe475cbc545b2831d5732d6621ba0e827f9629a",
        "utils.py": "c4411aa0fecf6ea7aa83ee63c9235ed498c194a0480b9104a7a51d78811f9318",
    },
)
_TRITONBENCH = _raw(
    "thunlp/TritonBench",
    "603e28a5050e8c268f6883a69709d477a272d49a",
    "data/TritonBench_G_v1",
    "",
    "#" * 100,
    {
        "fast_layernorm.py": "88893ebaf54a50b2b6d06841628e5a00a27f8200b026740ed6ad536deb83f6ef",
        "fast_rms_layernorm.py": "8472a7e650fd06470906c759423c0a0ce64c007e4549928bc96ff605eb297c33",
        "layer_norm_liger.py": "b00cec282bbcbea49c4be9cb867385f5deb5d64f869e7458624fb412a7a5000d",
        "layer_norm_ops.py": "e81cf64915cbb9bc014d05c84b66dd473c782f068b1fa2494e37771c594ca69a",
        "layer_norm_triton.py": "dc9269766a0a4252723fd8795dd3d14fa0d08a070c30181f09449f868b834a9b",
        "layernorm_fwd_triton.py": "9ad4b038ee7d5fff373705d8ef8c0a4a9a3100a064db07703f89d61b32de6c88",
        "rms_norm_triton.py": "dce88560afff1c21715628bab92d4ed89d0070ce6d3f343aa31e7c47c643498c",
        "rmsnorm_fused.py": "5ce7107b2e57167e62682d51a302b72677d194b8c59c8735acf33d3bbcb0ad1c",
        "rmsnorm_fused_llama.py": "8d86a4478e7aae6f3ee07d76a2f6394a2fd50b105d7772e90ced43e6cfe9e18e",
        "rmsnorm_implementation.py": "39d6c3d59ef00fb3f933247b608067b4907b844107d033813139719605bce7e0",
        "rmsnorm_triton.py": "61038e7d13a219fb9fdd2f236d05a8c441d5530e28d3128e4d994503d9c4c7fb",
    },
)
_SOL = File(
    "rmsnorm_kernel.py",
    "https://raw.githubusercontent.com/NVIDIA/SOL-ExecBench/8d2237d2012cba81f64905b273b592653623abf9"
    "/examples/triton/rmsnorm/kernel.py",
    "f0d6509e55153fd1f9600c71af5cb1567d6ded7527387efa24647ce951df8073",
)
_SQL = ("sqlalchemy", "typing-extensions", "pyyaml", "packaging")
_CUTE = ("nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1", "nvidia-cutlass-dsl-libs-core==4.8.1",
         "nvidia-cutlass-dsl-libs-cu13==4.8.1", "apache-tvm-ffi", "torch-c-dlpack-ext", "cuda-bindings",
         "cuda-pathfinder", "einops", "protobuf")  # fmt: skip
_NO_BUILD = (("FLASH_ATTENTION_SKIP_CUDA_BUILD", "TRUE"), ("MAMBA_SKIP_CUDA_BUILD", "TRUE"))

PACKAGES = (
    Package("liger-kernel", "0.8.0", "liger"),
    Package("liger-kernel", "0.8.5", "liger"),
    Package("fla-core", "0.6.0", "fla", beside=("einops",)),
    Package("rwkv-fla", "0.7.202508221413", "fla", beside=("einops",)),
    Package("flash-attn", "2.8.3.post2", "prenorm", source=True, environment=_NO_BUILD, beside=("einops",)),
    Package("mamba-ssm", "2.3.2.post1", "prenorm", source=True, environment=_NO_BUILD, beside=("einops",)),
    Package("flag-gems", "5.0.2", "flag_gems", beside=_SQL),
    Package("xjh-gems", "4.4", "flag_gems", beside=_SQL),
    Package("conch-triton-kernels", "1.3", "conch"),
    Package("quack-kernels", "0.6.5", "quack", beside=_CUTE),
    Package("lmdeploy", "0.18.0", "lmdeploy"),
    Package("dlblas", "0.0.7", "dlblas"),
    Package("trinix", "0.1.4", "trinix"),
    Package("flashnn", "0.1.1", "flashnn"),
    Package("cuda-triton-multiarch", "0.1.3", "multiarch"),
    Package("torchnorm", "0.1.2", "torchnorm"),
    Package("triformer", "3.0.7", "triformer"),
    Package("ply-ai", "1.0.5", "ply"),
    Package("rotalabs-accel", "1.1.1", "rotalabs"),
    Package("qwen3-tts-triton", "0.3.0", "tts", beside=("scipy",)),
    Package("omnivoice-triton", "0.1.0", "tts"),
    Package("freesolo-chalk", "0.5.7", "chalk"),
    Package("chronicals", "0.1.4", "chronicals"),
    Package("xformers", "0.0.35", "xformers"),
    Package("unsloth", "2025.9.1", "unsloth", beside=("transformers==5.17.0",), needs=True),
    Package("unsloth", "2026.10.9", "unsloth", beside=("transformers==5.17.0",), needs=True),
    Package("sglang", "0.5.23", "sglang"),
    Package("flashinfer-python", "0.7.2.post1", "flashinfer"),
    Package("flashlib", "0.4.0", "flashlib"),
    Package("timm", "1.0.31", "modules"),
    Package("transformers", "5.17.0", "modules", needs=True),
    Package("attorch", "67c2772", "attorch", files=_ATTORCH),
    Package("TritonBench-G", "603e28a", "tritonbench", files=_TRITONBENCH),
    Package("SOL-ExecBench", "8d2237d", "sol_execbench", files=(_SOL,)),
)
