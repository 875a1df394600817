"""config.json of an EAGLE-3 head, in both layouts, to and from `Eagle3Config`.

    native        keys of one decoder layer and of the head side by side (SafeAILab's EAGLE, SGLang, vLLM)
    speculators   the layer under `transformer_layer_config`, the target under `speculators_config` (vLLM)

Layer ids have two conventions. Id i of `eagle_aux_hidden_state_layer_ids` at the top level is the state entering layer
i; inside `eagle_config` it is the state leaving layer i. Where both stand, the top level is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.head_words import is_eagle3_config
from outpace.models.config import DecoderConfig, RopeConfig
from outpace.models.eagle3_config import Eagle3Config

__all__ = ["Verifier", "read_config", "write_config"]

_TARGET_LAYERS = "target_num_hidden_layers"
"""Of outpace's own; others pass over it."""
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OTHER_KINDS = "outpace runs EAGLE-3 heads with one layer"
_SPECULATORS_VERSION = "0.4.0"
_NATIVE_ARCHITECTURE, _SPECULATORS_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
_USUAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Keys of `eagle_config` that describe another head where they say something else."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target a head was made for.

    Args:
        name: hub id or path.
        architectures: as in its config.json.
    """

    name: str
    architectures: tuple[str, ...] = ()


def read_config(config: Mapping[str, Any], path: Path) -> tuple[Eagle3Config, Verifier | None]:
    """Reads a parsed config.json.

    Args:
        config: its keys.
        path: of the file, for messages.

    Raises:
        UnsupportedModel: no EAGLE-3 head, or one with something that outpace does not run; names it.
        CheckpointError: a value that is not possible; names file, key and value.
    """
    _refuse_others(config, path)
    reader = _Reader(config, path)
    if "speculators_model_type" in config:
        layer_config = reader.mapping("transformer_layer_config")
        if not layer_config:
            raise CheckpointError(f"{path} has no 'transformer_layer_config': it describes the head's layer")
    else:
        layer_config = dict(config)
    layer = DecoderConfig.from_hf(layer_config, path)
    if layer.num_layers != 1:
        raise UnsupportedModel(f"{path}: the head has {layer.num_layers} layers; {_OTHER_KINDS}")
    if layer.windows != (None,):
        raise UnsupportedModel(
            f"{path}: the head attends in a window of {layer.windows[0]}; {_OTHER_KINDS} that sees all"
        )
    eagle = reader.mapping("eagle_config")
    for key, usual in _USUAL.items():
        if eagle.get(key, usual) != usual:
            raise UnsupportedModel(f"{path}: eagle_config says {key}={eagle[key]!r}; {_OTHER_KINDS} and {key}={usual}")
    aux_layers = _aux_layers(reader, eagle)
    num_aux = reader.count("num_aux_hidden_states", 3 if aux_layers is None else len(aux_layers))
    if aux_layers is not None and len(aux_layers) != num_aux:
        raise CheckpointError(f"{path} says num_aux_hidden_states={num_aux}, but names layers {list(aux_layers)}")
    head = Eagle3Config(
        layer=layer,
        target_hidden_size=reader.count("target_hidden_size", layer.hidden_size),
        draft_vocab_size=reader.count("draft_vocab_size", layer.vocab_size),
        aux_layers=aux_layers,
        num_aux=num_aux,
        fc_bias=reader.flag("bias"),
        shares_target_head=reader.flag("shares_target_head"),
        target_layers=reader.count(_TARGET_LAYERS, 1) if _TARGET_LAYERS in config else None,
        **{name: reader.flag(name) for name in _FLAGS},
    )
    if head.draft_vocab_size > head.vocab_size:
        raise CheckpointError(
            f"{path} says draft_vocab_size={head.draft_vocab_size}; the target's vocabulary has {head.vocab_size}"
        )
    return head, _read_verifier(reader)


def write_config(config: Eagle3Config, layout: str, verifier: Verifier | None, dtype: str) -> dict[str, Any]:
    """The keys of config.json.

    Args:
        config: the head.
        layout: "native" or "speculators".
        verifier: its target; None leaves it out.
        dtype: transformers' name of the type its matrices are stored in.
    """
    own = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{name: getattr(config, name) for name in _FLAGS},
        "num_aux_hidden_states": config.num_aux,
    }
    if config.fc_bias:
        own["bias"] = True
    if config.shares_target_head:
        own["shares_target_head"] = True
    if config.target_layers is not None:
        own[_TARGET_LAYERS] = config.target_layers
    layer = _layer_keys(config.layer, dtype)
    if layout == "speculators":
        if config.aux_layers is not None:
            own[_AUX_IDS] = list(config.aux_layers)
        return {
            "architectures": [_SPECULATORS_ARCHITECTURE],
            "speculators_model_type": "eagle3",
            "speculators_version": _SPECULATORS_VERSION,
            "speculators_config": _speculators_config(verifier),
            "transformer_layer_config": layer,
            "tie_word_embeddings": False,
            "dtype": dtype,
            **own,
        }
    if config.aux_layers is not None:
        own[_AUX_IDS] = list(config.aux_layers)
        own["eagle_config"] = {
            _AUX_IDS: [layer_id - 1 for layer_id in config.aux_layers],
            "use_aux_hidden_state": True,
        }
    if verifier is not None:
        own["verifier"] = {"name_or_path": verifier.name, "architectures": list(verifier.architectures)}
    return {"architectures": [_NATIVE_ARCHITECTURE], **layer, **own}


def _speculators_config(verifier: Verifier | None) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    known = verifier or Verifier("")
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": known.name or None, "architectures": list(known.architectures)},
    }


def _layer_keys(layer: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The layer in transformers' words, as written by version 4 and read by all."""
    keys: dict[str, Any] = {
        "model_type": layer.model_type,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": layer.vocab_size,
        "max_position_embeddings": layer.max_positions,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": _rope_scaling(layer.rope),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if layer.model_type in ("llama", "qwen3"):
        keys["attention_bias"] = layer.qkv_bias
    if layer.model_type == "llama":
        keys["mlp_bias"] = layer.mlp_bias
    if layer.model_type == "mistral":
        keys["sliding_window"] = None
    return keys


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.type == "default":
        return None
    found: dict[str, Any] = {
        "rope_type": rope.type,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    if rope.type == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        found |= {name: value for name in names if (value := getattr(rope, name)) is not None}
    return found


def _aux_layers(reader: _Reader, eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    top = reader.ids(reader.keys, 0)
    return reader.ids(eagle, 1) if top is None else top


def _read_verifier(reader: _Reader) -> Verifier | None:
    given = reader.mapping("speculators_config").get("verifier") or reader.mapping("verifier")
    if not isinstance(given, Mapping) or not isinstance(given.get("name_or_path"), str):
        return None
    names = given.get("architectures")
    return Verifier(given["name_or_path"], tuple(map(str, names)) if isinstance(names, list) else ())


def _refuse_others(config: Mapping[str, Any], path: Path) -> None:
    """Heads of other methods, and models that are no heads, by name."""
    kind = config.get("speculators_model_type", config.get("model_type"))
    if config.get("speculators_model_type") not in (None, "eagle3"):
        raise UnsupportedModel(f"{path}: a {kind!r} head of speculators is not supported; {_OTHER_KINDS}")
    names = ", ".join(map(str, config.get("architectures") or [])) or "unnamed"
    for word, name in {"medusa": "Medusa", "dflash": "DFlash", "mtp": "multi-token prediction"}.items():
        if word in f"{names} {kind} {' '.join(config)}".lower():
            hint = ", and with method 'mtp' the MTP layer inside a model's checkpoint" * (word == "mtp")
            raise UnsupportedModel(f"{path}: {name} heads ({names}) are not supported; {_OTHER_KINDS}{hint}")
    if not is_eagle3_config(config):
        raise UnsupportedModel(
            f"{path} describes no EAGLE-3 head: model type {kind!r}, architecture {names}, no draft_vocab_size"
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked access to the keys of a config file."""

    keys: Mapping[str, Any]
    path: Path

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty if there is none."""
        value = self.keys.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return dict(value or {})

    def flag(self, key: str) -> bool:
        """True or false; false if there is none."""
        value = self.keys.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 1."""
        value = self.keys.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        return value

    def ids(self, keys: Mapping[str, Any], shift: int) -> tuple[int, ...] | None:
        """Layer ids, moved by `shift`; None if there are none."""
        value = keys.get(_AUX_IDS)
        if value is None or value == []:  # some write an empty list where they mean the usual layers
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(_AUX_IDS, value, "a list of layer numbers")
        return tuple(sorted({item + shift for item in value}))

    def _wrong(self, key: str, value: object, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} says {key}={value!r}; it must be {text}")
