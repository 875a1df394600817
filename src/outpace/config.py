"""Settings of an engine, fixed once it is built. The help text of a field is the command line's help.

Never imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from typing import Any

from outpace.checks import number
from outpace.errors import InvalidParameter
from outpace.head_words import names_eagle3_head
from outpace.params import check_integer, check_num_speculative_tokens

__all__ = [
    "CONTROLS",
    "DTYPES",
    "KERNELS",
    "METHODS",
    "QUANTIZATIONS",
    "VERIFICATIONS",
    "EngineConfig",
    "SpeculativeConfig",
    "field_help",
    "field_kind",
]

METHODS = ("auto", "suffix", "ngram", "draft_model", "early_exit", "eagle3", "mtp", "none")
CONTROLS = ("adaptive", "fixed")
QUANTIZATIONS = ("auto", "file", "int8", "int4", "none")
DTYPES = ("auto", "float32", "float16", "bfloat16")
VERIFICATIONS = ("coupled", "standard", "block")
_BRANCHING = ("auto", "suffix", "draft_model", "early_exit", "eagle3", "mtp")
KERNELS = ("auto", "native", "torch")
_FREE = ("suffix", "ngram")
"""Methods that look drafts up, which costs next to nothing."""
_MOST_FREE, _MOST_COMPUTED, _MOST_FIXED = 16, 8, 5
_MOST_BRANCHES, _AUTOMATIC_WIDTH = 8, 3
MAX_LOOKUP = 32
"""Longest n-gram that prompt lookup compares."""
_BELONGS_TO = {
    "model": ("draft_model", "eagle3", "mtp", "auto"),
    "quantization": ("draft_model", "eagle3", "mtp", "auto"),
    "exit_layer": ("early_exit",),
    "adapter": ("early_exit",),
    "suffix_pool_file": ("suffix", "auto"),
}


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made. Keys are those of vLLM's `--speculative-config` where it has them."""

    method: str = _option(
        "auto",
        "drafting method: auto (suffix, and the draft model or EAGLE-3 head if one is named, else the MTP layer of the "
        "target's checkpoint if it has one, else the head that comes with outpace for it, if one does), "
        + ", ".join(METHODS[1:]),
    )
    model: str | None = _option(
        None,
        "draft model or EAGLE-3 head: hub id, folder, GGUF file or alias (method draft_model, eagle3 or auto); a "
        "checkpoint with an MTP layer (method mtp). None: what comes with the target (mtp) or with outpace (eagle3)",
    )
    num_speculative_tokens: int | None = _option(
        None,
        f"most draft tokens a step; None: under adaptive control {_MOST_FREE} where drafts are looked up and "
        f"{_MOST_COMPUTED} where they are computed, under fixed control {_MOST_FIXED}",
    )
    tree_width: int | None = _option(
        None,
        "most continuations of a draft token; 1: drafts are chains, more: they may be trees, num_speculative_tokens "
        "counting all branches (not with method ngram); None: under adaptive control what pays, under fixed control 1",
    )
    prompt_lookup_max: int = _option(8, "longest n-gram looked up, in tokens (method ngram)")
    prompt_lookup_min: int | None = _option(
        None, "shortest n-gram looked up, in tokens; None: 2, or the longest if that is shorter (method ngram)"
    )
    suffix_decoding_max_cached_requests: int = _option(
        0, "past outputs that drafts may be taken from, each tenant's own only; 0: none (method suffix or auto)"
    )
    suffix_pool_file: str | None = _option(
        None, "file from which past outputs are read at the start, and to which a server writes them at its end"
    )
    quantization: str | None = _option(
        None, "of the draft model, EAGLE-3 head or MTP layer, as the target's option of that name; None: as the target"
    )
    exit_layer: int | None = _option(
        None,
        "layers the early-exit drafter runs (method early_exit); None: as the adapter was trained, or found by a probe",
    )
    adapter: str | None = _option(
        None,
        "folder of a trained adapter at the exit (method early_exit); None: the one that comes with outpace, if any",
    )
    rejection_sample_method: str = _option(
        "coupled",
        "how sampled drafts are verified: coupled (the text of a seed never changes), or standard or block (rejection "
        "sampling: the same distribution, not the same text per seed)",
    )
    disable_by_batch_size: int | None = _option(
        None, "no drafts in steps in which more requests than this are running; None: always drafts"
    )

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidParameter(f"method={self.method!r} is not known; possible: {', '.join(METHODS)}")
        self._check_counts()
        self._check_words()
        for name, methods in _BELONGS_TO.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise InvalidParameter(
                    f"{name}={getattr(self, name)!r} goes with method {methods[0]!r}, not {self.method!r}"
                )
        if self.tree_width is not None and self.tree_width > 1:
            self._check_trees()
        if self.suffix_pool_file is not None and not self.suffix_decoding_max_cached_requests:
            raise InvalidParameter(
                "suffix_pool_file needs suffix_decoding_max_cached_requests, the number of outputs to keep: 10000, say"
            )

    def _check_trees(self) -> None:
        if self.method not in _BRANCHING:
            raise InvalidParameter(
                f"tree_width={self.tree_width} goes with method {' or '.join(_BRANCHING)}, not {self.method!r}"
            )
        if self.rejection_sample_method != "coupled":
            raise InvalidParameter(
                f"tree_width={self.tree_width} goes with rejection_sample_method 'coupled', not "
                f"{self.rejection_sample_method!r}: drafts for rejection sampling are chains"
            )

    def _check_counts(self) -> None:
        """Also puts integers of other types, and the one default that follows from another, into place."""
        put = partial(object.__setattr__, self)
        if self.num_speculative_tokens is not None:
            put("num_speculative_tokens", check_num_speculative_tokens(self.num_speculative_tokens))
        put("prompt_lookup_max", _count("prompt_lookup_max", self.prompt_lookup_max, MAX_LOOKUP))
        shortest = min(2, self.prompt_lookup_max) if self.prompt_lookup_min is None else self.prompt_lookup_min
        put("prompt_lookup_min", _count("prompt_lookup_min", shortest, self.prompt_lookup_max))
        name = "suffix_decoding_max_cached_requests"
        most = getattr(self, name)
        put(name, check_integer(name, most, low=0 if most == 0 else 8, text="an integer: 0 (off), or at least 8"))
        for name, limit in (("exit_layer", None), ("disable_by_batch_size", None), ("tree_width", _MOST_BRANCHES)):
            if getattr(self, name) is not None:
                put(name, _count(name, getattr(self, name), limit))

    def _check_words(self) -> None:
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise InvalidParameter(
                f"quantization={self.quantization!r} is not known; possible: {', '.join(QUANTIZATIONS)}"
            )
        if self.rejection_sample_method not in VERIFICATIONS:
            raise InvalidParameter(
                f"rejection_sample_method={self.rejection_sample_method!r} is not known; possible: "
                f"{', '.join(VERIFICATIONS)}. Rules that change what the model says are not offered"
            )
        for name in ("model", "adapter", "suffix_pool_file"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidParameter(f"{name}={value!r} is not possible: it must be a name or a path")
        if self.method == "draft_model" and self.model is None:
            raise InvalidParameter("method='draft_model' needs a model: a hub id, a folder, a GGUF file or an alias")
        if self.method == "draft_model" and self.model is not None and names_eagle3_head(self.model):
            raise InvalidParameter(f"model={self.model!r} is an EAGLE-3 head: it goes with method 'eagle3'")

    def parts(self, *, adaptive: bool, own: str | None = None) -> list[SpeculativeConfig]:
        """The drafters these settings mean, one method each, in order of preference; none for method "none".

        Args:
            adaptive: how much is drafted is chosen in every step, and `num_speculative_tokens` is only the most. Then
                `tree_width` stays None where it is chosen too.
            own: method of a drafter that is there for the target without being named: mtp, its checkpoint carries a
                layer, or eagle3, a head comes with outpace. Method "auto" then drafts with it.
        """
        return [part._with_limits(adaptive) for part in self._parts(own)]

    def _with_limits(self, adaptive: bool) -> SpeculativeConfig:
        most, width = self.num_speculative_tokens, self.tree_width
        if most is None:
            most = (_MOST_FREE if self.method in _FREE else _MOST_COMPUTED) if adaptive else _MOST_FIXED
        if width is None and not (adaptive and self.method in _BRANCHING and self.rejection_sample_method == "coupled"):
            width = 1
        return replace(self, num_speculative_tokens=most, tree_width=width)

    def width_on(self, takes_trees: bool) -> int:
        """The most continuations of a token, by whether the target verifies drafts with branches exactly."""
        if not takes_trees:
            return 1
        return _AUTOMATIC_WIDTH if self.tree_width is None else self.tree_width

    def _parts(self, own: str | None) -> list[SpeculativeConfig]:
        if self.method == "none":
            return []
        if self.method != "auto":
            return [self]
        suffix = replace(self, method="suffix", model=None, quantization=None)
        if self.model is None:
            return [suffix] if own is None else [suffix, replace(self, method=own, suffix_pool_file=None)]
        word = _from_word(self.model)
        branches = self.tree_width if word["method"] in _BRANCHING else None
        named = replace(self, **word, tree_width=branches, suffix_pool_file=None)
        return [suffix] if named.method in (*_FREE, "auto", "none") else [suffix, named]

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Reads what users write: `auto`, `suffix`, `ngram` or `[ngram]`, `self` or `self:E`, `mtp`, `none`, a model,
        or a mapping of these fields.

        Raises:
            InvalidParameter: naming an unknown key or a value out of range.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if value is None:
            return cls(method="none")
        if isinstance(value, str):
            return cls(**_from_word(value))
        if not isinstance(value, Mapping):
            raise InvalidParameter(f"speculative_config={value!r} is not possible: give a word, a model or a mapping")
        known = {f.name for f in fields(cls)}
        options = {str(key).replace("-", "_"): item for key, item in value.items()}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidParameter(f"speculative_config has no {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
        return cls(**_with_word(options))


def _with_word(options: dict[str, Any]) -> dict[str, Any]:
    """A model written as one of the words (`ngram`, `self:20`) says the method, and must not contradict one given."""
    model = options.get("model")
    if "method" not in options and model is None and options.keys() & {"prompt_lookup_max", "prompt_lookup_min"}:
        return {**options, "method": "ngram"}  # as vLLM reads it
    if not isinstance(model, str) or not model:
        return options
    said = _from_word(model)
    if "method" not in options or said["method"] == options["method"]:
        for key, item in said.items():
            if key in options and key != "model" and options[key] != item:
                raise InvalidParameter(f"model={model!r} and {key}={options[key]!r} contradict each other")
        return {**options, **said}
    return options


def _count(name: str, value: int, most: int | None = None) -> int:
    text = "an integer, at least 1" if most is None else f"an integer, 1 to {most}"
    return check_integer(name, value, low=1, high=math.inf if most is None else most, text=text)


def _from_word(word: str) -> dict[str, Any]:
    if word in ("ngram", "[ngram]"):
        return {"method": "ngram", "model": None}
    if word in ("auto", "suffix", "mtp", "none"):
        return {"method": word, "model": None}
    name, colon, layer = word.partition(":")
    if name != "self":
        return {"method": "eagle3" if names_eagle3_head(word) else "draft_model", "model": word}
    if not colon:
        return {"method": "early_exit", "model": None}
    if not (layer.isascii() and layer.isdigit()):
        raise InvalidParameter(
            f"{word!r} is not possible: write self or self:E with E the number of layers, as self:20"
        )
    return {"method": "early_exit", "model": None, "exit_layer": int(layer)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str = _option("smollm2-135m", "target model: hub id, folder, GGUF file or alias")
    quantization: str = _option(
        "auto", "linear layers: int8, int4, file (as the file is quantised), none, or auto (file, else int8)"
    )
    dtype: str = _option(
        "auto",
        "weights that are not quantised: float32, float16, bfloat16, or auto (as stored); other than auto implies "
        "quantization none",
    )
    kernels: str = _option("auto", "native (compiled for this processor), torch, or auto (native where they run)")
    max_model_len: int | None = _option(
        None, "longest prompt plus output, in tokens; None: the model's own, at most 32768"
    )
    max_num_seqs: int = _option(8, "most requests computed side by side")
    max_num_batched_tokens: int = _option(512, "most rows (tokens) computed in one step; long prompts go in chunks")
    max_logprobs: int = _option(20, "most log probabilities a token that a request may ask for; -1: no limit")
    cache_tokens: int | None = _option(None, "most cached tokens over all requests; None: what memory allows")
    enable_prefix_caching: bool = _option(
        True, "keep rows of finished requests for those that begin with the same tokens; never changes text"
    )
    threads: int | None = _option(
        None, "CPU threads; None: the cores nobody else is using, looked at again while running"
    )
    trust_remote_code: bool = _option(False, "run Python code shipped with a tokenizer")
    allow_pickle: bool = _option(False, "load .bin weights, which can run code while they load")
    speculative_control: str = _option(
        "adaptive",
        "adaptive: who drafts how much is chosen in every step, so that tokens come fastest, num_speculative_tokens "
        "being the most; fixed: always as much as is possible",
    )
    speculative_floor: float = _option(
        0.98,
        "share of its plain rate that every request of a batch keeps, however much others gain; 0: only the sum counts",
    )

    def __post_init__(self) -> None:
        choices = {
            "quantization": QUANTIZATIONS,
            "dtype": DTYPES,
            "kernels": KERNELS,
            "speculative_control": CONTROLS,
        }
        for name, possible in choices.items():
            if getattr(self, name) not in possible:
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not known; possible: {', '.join(possible)}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_tokens", "threads"):
            if getattr(self, name) is not None:
                # Far more threads than cores only wait for each other: 1000 on two cores took 48 s a token.
                most = 4 * (os.cpu_count() or 1) if name == "threads" else None
                object.__setattr__(self, name, _count(name, getattr(self, name), most))
        floor = number(0.0, 1.0)("speculative_floor", self.speculative_floor, "a share, 0 to 1")
        object.__setattr__(self, "speculative_floor", floor)
        most = check_integer("max_logprobs", self.max_logprobs, low=-1, text="a count, or -1 for no limit")
        object.__setattr__(self, "max_logprobs", most)
        if not isinstance(self.model, str) or not self.model:
            raise InvalidParameter(
                f"model={self.model!r} is not possible: give a hub id, a folder, a GGUF file or an alias"
            )
        for name in ("enable_prefix_caching", "trust_remote_code", "allow_pickle"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not possible: it must be True or False")


def field_kind(item: Field[Any]) -> type:
    """int, float or str: what the command line reads for a field that is no bool."""
    kind = str(item.type)
    return int if "int" in kind else float if "float" in kind else str


def field_help(config: type, name: str) -> str:
    """The help text of one field, for the command line and the docs."""
    for item in fields(config):
        if item.name == name:
            return str(item.metadata["help"])
    raise KeyError(name)
