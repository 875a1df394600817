"""Settings of an engine, fixed once it is built. The help text of a field is the command line's help.

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outpace.errors import BadInput, InvalidParameter
from outpace.params import check_num_speculative_tokens

__all__ = ["METHODS", "QUANTIZATIONS", "EngineConfig", "SpeculativeConfig", "field_help"]

METHODS = ("ngram", "draft_model", "early_exit", "none")
QUANTIZATIONS = ("auto", "int8", "none")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made. Keys are those of vLLM's `--speculative-config` where it has them."""

    method: str = _option("ngram", "drafting method: " + ", ".join(METHODS))
    model: str | None = _option(None, "draft model: hub id, folder, GGUF file or alias (method draft_model)")
    num_speculative_tokens: int = _option(5, "most draft tokens a step")
    prompt_lookup_max: int = _option(8, "longest n-gram looked up, in tokens (method ngram)")
    prompt_lookup_min: int = _option(2, "shortest n-gram looked up, in tokens (method ngram)")
    exit_layer: int | None = _option(
        None, "layers the early-exit drafter runs (method early_exit); None probes for one"
    )
    adapter: str | None = _option(None, "folder of a trained adapter at the exit (method early_exit)")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidParameter(f"method={self.method!r} is not known; possible: {', '.join(METHODS)}")
        check_num_speculative_tokens(self.num_speculative_tokens)
        if self.method == "draft_model" and not self.model:
            raise InvalidParameter("method='draft_model' needs a model: a hub id, a folder, a GGUF file or an alias")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 32:
            raise InvalidParameter(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max} are not "
                "possible: 1 <= min <= max <= 32"
            )
        if self.exit_layer is not None and self.exit_layer < 1:
            raise InvalidParameter(f"exit_layer={self.exit_layer} is not possible: it must be at least 1")

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Reads what users write: `auto`, `ngram` or `[ngram]`, `self` or `self:E`, `none`, a model, or a mapping.

        Raises:
            InvalidParameter: naming an unknown key or a value out of range.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if value is None:
            return cls(method="none")
        if isinstance(value, str):
            return cls(**_from_word(value))
        known = {f.name for f in fields(cls)}
        options = {str(key).replace("-", "_"): item for key, item in value.items()}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidParameter(f"speculative_config has no {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
        if "method" not in options and options.get("model"):
            options = {**options, **_from_word(str(options["model"]))}
        return cls(**options)


def _from_word(word: str) -> dict[str, Any]:
    if word in ("auto", "ngram", "[ngram]"):
        return {"method": "ngram", "model": None}
    if word == "none":
        return {"method": "none", "model": None}
    name, colon, layer = word.partition(":")
    if name != "self":
        return {"method": "draft_model", "model": word}
    if not colon:
        return {"method": "early_exit", "model": None}
    if not layer.isdigit():
        raise InvalidParameter(
            f"{word!r} is not possible: write self or self:E with E the number of layers, as self:20"
        )
    return {"method": "early_exit", "model": None, "exit_layer": int(layer)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str = _option("smollm2-135m", "target model: hub id, folder, GGUF file or alias")
    quantization: str = _option("auto", "linear layers: int8, none (fp32), or auto (int8 on x86 CPUs)")
    max_model_len: int | None = _option(
        None, "longest prompt plus output, in tokens; None: the model's own, at most 32768"
    )
    max_num_seqs: int = _option(8, "most requests computed side by side")
    max_num_batched_tokens: int = _option(512, "most rows (tokens) computed in one step; long prompts go in chunks")
    cache_tokens: int | None = _option(None, "most cached tokens over all requests; None: what memory allows")
    threads: int | None = _option(None, "CPU threads; None: the cores this process may use")
    trust_remote_code: bool = _option(False, "run Python code shipped with a tokenizer")
    allow_pickle: bool = _option(False, "load .bin weights, which can run code while they load")

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            raise InvalidParameter(
                f"quantization={self.quantization!r} is not known; possible: {', '.join(QUANTIZATIONS)}"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name}={value} is not possible: it must be at least 1")
        if not self.model:
            raise BadInput("model='' is not possible: give a hub id, a folder, a GGUF file or an alias")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def field_help(config: type, name: str) -> str:
    """The help text of one field, for the command line and the docs."""
    for item in fields(config):
        if item.name == name:
            return str(item.metadata["help"])
    raise KeyError(name)
