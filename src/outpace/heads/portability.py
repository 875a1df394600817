"""What other engines make of an EAGLE-3 head, and what they would run wrongly without a word."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.errors import InvalidParameter
from outpace.models.eagle3_config import Eagle3Config

__all__ = ["ENGINES", "LAYOUT_OF", "require_portable"]

ENGINES = ("vllm", "sglang")
LAYOUT_OF = {"vllm": "speculators", "sglang": "native"}
"""The layout each engine reads best: vLLM finds target and method in its own."""


def require_portable(config: Eagle3Config, engine: str) -> None:
    """Raises InvalidParameter if an engine cannot run a head as it was trained; says why."""
    reason = next(_vllm(config) if engine == "vllm" else _sglang(config), None)
    if reason is not None:
        raise InvalidParameter(f"{engine} cannot run this head: {reason}")


def _vllm(config: Eagle3Config) -> Iterator[str]:
    if config.layer.model_type not in ("llama", "qwen3"):
        yield f"its layer is of type {config.layer.model_type}, and heads there are llama or qwen3"
    if config.fc_bias:
        yield "its fc has a bias, which is left out there"


def _sglang(config: Eagle3Config) -> Iterator[str]:
    if config.norm_before_residual:
        yield "norm_before_residual is not read there, and its layer would add to the feature as it is"
    if config.layer.model_type != "llama":
        yield f"its layer is of type {config.layer.model_type}, and heads there are llama"
    if config.layer.qkv_bias or config.layer.o_bias or config.layer.mlp_bias:
        yield "its layer has biases, which are left out there"
    if config.fc_bias:
        yield "its fc has a bias, which is left out there"
    if config.aux_layers is not None and 0 in config.aux_layers:
        yield "it reads the state entering layer 0, and layers there are named by the one before"
