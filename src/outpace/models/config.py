"""What a checkpoint's config.json says, read into one frozen description of the Llama shape.

Never imports torch. Keys are those of transformers, both of version 4 (`rope_theta`, `rope_scaling`) and of
version 5 (`rope_parameters`). What the decoder cannot run is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import CheckpointError, UnsupportedModel

__all__ = [
    "SUPPORTED_ROPE_TYPES",
    "SUPPORTED_TYPES",
    "DecoderConfig",
    "ReadsPairs",
    "RopeConfig",
    "expected_tensors",
    "is_redundant",
]

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
"""`model_type` of the architectures the lean decoder runs (SmolLM and SmolLM2 are llama; mimo is qwen2 inside)."""

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_LAYER_TYPES = ("full_attention", "sliding_attention")
_DEFAULT_WINDOW = 4096  # what transformers takes when a config does not name the window


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how its frequencies are stretched for long contexts.

    Args:
        theta: base of the geometric series of frequencies.
        type: default, linear, llama3 or yarn.
        factor: how many times longer the context is than the one trained first.
        original_max_positions: that first context, in tokens (llama3, yarn).
        low_freq_factor: llama3: wavelengths above original / this are stretched fully.
        high_freq_factor: llama3: wavelengths below original / this are left alone.
        beta_fast: yarn: frequencies with more rotations than this over the first context are left alone.
        beta_slow: yarn: frequencies with fewer rotations than this are stretched fully.
        attention_factor: yarn: multiplies cos and sin; None derives it from factor (and mscale).
        mscale: yarn: numerator's weight in the derived attention factor; None or 0 is plain.
        mscale_all_dim: yarn: the denominator's.
        truncate: yarn: round the ramp's ends to whole dimensions.
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The Llama shape: pre-norm blocks of grouped-query attention with rotary embedding and a gated SiLU MLP.

    Args:
        model_type: transformers' name of the architecture.
        hidden_size: width H of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of a head, even.
        vocab_size: rows of the embedding, padded ids included.
        max_positions: most positions the model was made for.
        rms_norm_eps: added to the mean square in every norm.
        tie_word_embeddings: the output head is the embedding.
        rope: rotary embedding.
        windows: per layer, how many of the last positions (its own included) a row sees; None is all.
        qkv_bias: query, key and value projections have a bias.
        o_bias: so has the attention's output projection.
        mlp_bias: so have the MLP's three projections.
        qk_norm: query and key heads are RMS-normalised before the rotary embedding (Qwen3).
        mtp_layers: layers behind the decoder that guess a token further (`models.mtp_config`); it runs without them.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mtp_layers: int = 0

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of one position's keys and values in all layers, float32."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: object = "config.json") -> DecoderConfig:
        """Reads a parsed config.json.

        Args:
            config: its keys.
            source: the file it was read from, for messages.

        Raises:
            UnsupportedModel: another architecture, activation, rope type or a quantized checkpoint, by name.
            CheckpointError: a key is missing or of another kind, or sizes contradict each other; names source and key.
        """
        try:
            return cls._read(config)
        except _DamagedConfig as error:
            raise CheckpointError(f"{source} {error}") from error

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> DecoderConfig:
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list):
            raise _DamagedConfig(f"says architectures={architectures!r}; it must be a list of names")
        kind = str(config.get("model_type", "none"))
        if kind not in SUPPORTED_TYPES:
            names = ", ".join(map(str, architectures)) or "unnamed"
            raise UnsupportedModel(
                f"model type {kind!r} (architecture {names}) is not supported; supported: {', '.join(SUPPORTED_TYPES)}"
            )
        _refuse_variants(config)
        num_layers, num_heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
        hidden_size, max_positions = _size(config, "hidden_size"), _size(config, "max_position_embeddings")
        head_dim = _size(config, "head_dim", hidden_size // num_heads)
        any_bias = kind in ("llama", "qwen3") and _flag(config, "attention_bias")
        result = cls(
            model_type=kind,
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=_size(config, "vocab_size"),
            max_positions=max_positions,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, low=0),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            rope=_rope(config, max_positions),
            windows=_windows(config, kind, num_layers),
            qkv_bias=kind in ("qwen2", "mimo") or any_bias,
            o_bias=any_bias,
            mlp_bias=kind == "llama" and _flag(config, "mlp_bias"),
            qk_norm=kind == "qwen3",
            mtp_layers=_size(config, "num_nextn_predict_layers", 0, low=0) if kind == "mimo" else 0,
        )
        _check_heads(result)
        return result


@dataclass(frozen=True, slots=True)
class ReadsPairs:
    """Of layers whose attention reads two rows side by side: norms of the stream and of what comes beside it.

    Their query, key and value projections have twice the inputs, and `hidden_norm.weight` [H] is the stream's norm.

    Args:
        adds_to_normed: what the layer finds is added to the stream behind its norm; otherwise to the stream itself.
    """

    adds_to_normed: bool = False


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor such a checkpoint has, in transformers' names, with its shape."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (outputs, inputs, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_redundant(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor beyond `expected_tensors` repeats what is known: a tied head, saved rotary frequencies."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported; supported: silu")
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedModel(
            f"weights quantized by {method!r} are not supported; use the original checkpoint or a GGUF file"
        )


class _DamagedConfig(Exception):
    """What config.json says cannot be; the message goes on where the file's name ends."""


def _size(config: Mapping[str, Any], key: str, default: int | None = None, *, low: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise _DamagedConfig(f"has no {key!r}; it is needed for model type {config.get('model_type')!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _DamagedConfig(f"says {key}={value!r}; it must be a whole number of at least {low}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float, *, low: float) -> float:
    """A finite number above `low`; the default only where the key is absent."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= sys.float_info.max:
        raise _DamagedConfig(f"says {key}={value!r}; it must be a number above {low}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _DamagedConfig(f"says {key}={value!r}; it must be true or false")
    return value


def _window(config: Mapping[str, Any]) -> int | None:
    """Rows a sliding window spans; null is no window."""
    if config.get("sliding_window", _DEFAULT_WINDOW) is None:
        return None
    return _size(config, "sliding_window", _DEFAULT_WINDOW)


def _check_heads(config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise _DamagedConfig(
            f"says num_attention_heads={config.num_heads}, num_key_value_heads={config.num_kv_heads}; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise _DamagedConfig(f"gives head_dim={config.head_dim}; the rotary embedding needs an even one")


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}  # in transformers' order
    if not isinstance(given, Mapping):
        raise _DamagedConfig(f"says rope_scaling or rope_parameters={given!r}; it must be an object")
    given = {"rope_theta": config.get("rope_theta"), **given}
    given = {key: value for key, value in given.items() if value is not None}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor={partial} is not supported; supported: 1")
    key = "original_max_position_embeddings"
    original = _size(config, key, _size(given, key, max_positions))
    if kind in ("linear", "llama3") and "factor" not in given:
        raise _DamagedConfig(f"has rope type {kind!r} without a 'factor'")
    rope = RopeConfig(
        theta=_number(given, "rope_theta", 1e4, low=1),
        type=kind,
        factor=1.0 if kind == "default" else _number(given, "factor", max_positions / original, low=0),
        original_max_positions=original,
        low_freq_factor=_number(given, "low_freq_factor", 1.0, low=0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0, low=0),
        beta_fast=_number(given, "beta_fast", 32.0, low=0),
        beta_slow=_number(given, "beta_slow", 1.0, low=0),
        attention_factor=_number(given, "attention_factor", 1.0, low=0) if "attention_factor" in given else None,
        mscale=_weight(given, "mscale"),
        mscale_all_dim=_weight(given, "mscale_all_dim"),
        truncate=_flag(given, "truncate", True),
    )
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise _DamagedConfig(
            f"says low_freq_factor={rope.low_freq_factor}, high_freq_factor={rope.high_freq_factor}; "
            "the first must be the smaller"
        )
    return rope


def _weight(given: Mapping[str, Any], key: str) -> float | None:
    """A number above 0; 0 stands for none."""
    return _number(given, key, 0, low=0) if given.get(key) else None


def _windows(config: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int | None, ...]:
    if kind == "llama":
        return (None,) * num_layers
    if kind == "mistral":
        return (_window(config),) * num_layers
    window = _window(config) if _flag(config, "use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        full = _size(config, "max_window_layers", 28, low=0)
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or not all(isinstance(item, str) for item in types):
        raise _DamagedConfig(f"says layer_types={types!r}; it must be a list of names")
    unknown = sorted(set(types) - set(_LAYER_TYPES))
    if unknown:
        raise UnsupportedModel(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(_LAYER_TYPES)}")
    if len(types) != num_layers:
        raise _DamagedConfig(f"lists {len(types)} layer_types for num_hidden_layers={num_layers}")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)
