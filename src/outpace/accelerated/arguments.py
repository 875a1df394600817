"""From a call of `generate` to complete, checked settings and prompts without padding.

Values of the call, of a given generation config and of the model's own are combined by transformers itself, and its own
functions make the logits processors and stopping criteria: what an argument means is then what it means there. These
functions are not part of its public interface, so all uses of them are here and in `prompts.py`, and
`check_transformers` says so when an installed version lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from outpace.accelerated.division import divide_criteria, divide_sampling, for_one, speculation_of
from outpace.accelerated.prompts import read_padding, read_prompts
from outpace.accelerated.refusals import check_call, check_config, check_leftovers
from outpace.checks import check_integer
from outpace.errors import InvalidParameter, InvalidPrompt, UnsupportedModel
from outpace.params import SamplingParams, SpeculationParams

__all__ = ["GenerateCall", "check_transformers", "read_call"]

_NEEDED = (
    "_prepare_generation_config",
    "_prepare_special_tokens",
    "_prepare_attention_mask_for_generation",
    "_prepare_generated_length",
    "_validate_generated_length",
    "_get_logits_processor",
    "_get_stopping_criteria",
)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of `generate`, complete and checked. B prompts, each continued `copies` times: B * copies rows.

    Args:
        model: the wrapped model.
        config: the generation config in force.
        input_ids: [B, L] int64 prompts as they were given, padding on the left.
        mask: [B, L] int64, 0 for padding, or None if there is none in any prompt.
        padding: [B] padded tokens of each prompt.
        copies: sequences for each prompt.
        max_new_tokens: tokens after which a sequence ends.
        stop_ids: ids that end a sequence.
        has_eos: whether transformers fills a sequence that has ended with padding. Without an end of sequence token a
            sequence whose stopping criterion is met goes on until the last one has met its own.
        pad_id: what fills the place behind a sequence that has ended.
        criteria: stopping criteria that are to be looked at after every token.
        sampling: parameters of the engine, the same for all rows but for their logits processors.
        speculation: how drafts are made for this call.
        filtered: config of the logits processors: what `sampling` does is switched off in it.
        processors: the caller's own logits processors.
        prefix_function: the caller's `prefix_allowed_tokens_fn`.
        streamer: takes tokens as they come, or None.
    """

    model: PreTrainedModel
    config: GenerationConfig
    input_ids: torch.Tensor
    mask: torch.Tensor | None
    padding: list[int]
    copies: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    has_eos: bool
    pad_id: int | None
    criteria: StoppingCriteriaList
    sampling: SamplingParams
    speculation: SpeculationParams
    filtered: GenerationConfig
    processors: LogitsProcessorList
    prefix_function: Callable[[int, torch.Tensor], list[int]] | None
    streamer: Any

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0] * self.copies

    def prompt(self, row: int) -> torch.Tensor:
        """[1, L] the prompt of a row, with its padding."""
        return self.input_ids[row // self.copies][None]

    def prompt_token_ids(self, row: int) -> list[int]:
        """The prompt of a row, without its padding."""
        index = row // self.copies
        ids: list[int] = self.input_ids[index, self.padding[index] :].tolist()
        return ids

    def row_processors(self, row: int) -> LogitsProcessorList:
        """What changes the logits of a row; takes ([1, length] ids with the padding, [1, V] logits)."""
        index, function = row // self.copies, self.prefix_function
        return _make_processors(
            self.model,
            self.filtered,
            self.prompt(row),
            None if self.mask is None else self.mask[index][None],
            self.processors,
            None if function is None else lambda _, ids: function(index, ids),
        )


def check_transformers(model: PreTrainedModel) -> None:
    """Makes sure that the model generates by transformers' own loop, in a version that is known here.

    Raises:
        UnsupportedModel: naming what is missing, or who replaced `generate`.
    """
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} of transformers {transformers.__version__} has no {missing[0]}: give a model that "
            "can generate, with transformers 5.24 or a version close to it"
        )
    if "generate" in vars(model) or type(model).generate is not transformers.GenerationMixin.generate:
        raise UnsupportedModel(
            f"{type(model).__name__} has a generate of its own, which outpace cannot stand in for: call that one"
        )


def read_call(
    model: PreTrainedModel,
    tokenizer: Any,
    arguments: Mapping[str, Any],
    *,
    vocab_size: int,
    methods: Collection[str],
) -> GenerateCall:
    """Reads the arguments of a call.

    Args:
        model: the wrapped model.
        tokenizer: stands in where the call gives none.
        arguments: what the caller gave, by name. A setting that is None is switched off, an argument that is None
            was not given.
        vocab_size: width of the model's logits.
        methods: loaded drafters.

    Raises:
        InvalidParameter: an argument that is impossible, unknown or cannot be honoured; names it.
        InvalidPrompt: prompts of a kind, shape or padding that cannot be continued.
    """
    given = check_call(arguments)
    named = {name: given.pop(name, None) for name in _NAMED}
    seed = _checked_seed(named["seed"])
    with _errors_named():
        config, leftovers, default_lengths = _combine(model, named["generation_config"], given)
        check_config(config, model.generation_config)
        attention_mask = leftovers.pop("attention_mask", None)
        input_ids = read_prompts(config, named["inputs"], leftovers.pop("input_ids", None))
        check_leftovers(leftovers)
        mask, padding = read_padding(model, config, input_ids, attention_mask)
        _set_lengths(model, config, input_ids, default_lengths)
        criteria = model._get_stopping_criteria(
            config,
            StoppingCriteriaList(named["stopping_criteria"] or ()),
            tokenizer if named["tokenizer"] is None else named["tokenizer"],
        )
        processors = LogitsProcessorList(named["logits_processor"] or ())
        # Transformers looks at most values where it makes logits processors of them.
        _make_processors(model, for_one(config), input_ids[:1], None, processors, named["prefix_allowed_tokens_fn"])
    filtered, sampling = divide_sampling(config, seed)
    rest, max_length, stop_ids = divide_criteria(criteria, vocab_size)
    copies = config.num_return_sequences or 1
    if named["streamer"] is not None and input_ids.shape[0] * copies > 1:
        raise InvalidParameter(
            f"streamer is not possible with {input_ids.shape[0] * copies} sequences: stream one at a time"
        )
    return GenerateCall(
        model=model,
        config=config,
        input_ids=input_ids,
        mask=mask,
        padding=padding,
        copies=copies,
        max_new_tokens=max(1, max_length - input_ids.shape[1]),
        stop_ids=stop_ids,
        has_eos=any(hasattr(criterion, "eos_token_id") for criterion in criteria),
        pad_id=None if config._pad_token_tensor is None else int(config._pad_token_tensor),
        criteria=rest,
        sampling=sampling,
        speculation=speculation_of(config, methods),
        filtered=filtered,
        processors=processors,
        prefix_function=named["prefix_allowed_tokens_fn"],
        streamer=named["streamer"],
    )


_NAMED = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
    "seed",
)
"""Arguments that are neither settings of a generation config nor the prompt by its own name."""


def _checked_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    return check_integer("seed", seed, low=-(2**63), high=2**64 - 1, text="a 64-bit integer")


@contextmanager
def _errors_named() -> Iterator[None]:
    """What transformers finds wrong is the caller's to mend."""
    try:
        yield
    except (InvalidParameter, InvalidPrompt):
        raise
    except (ValueError, TypeError) as error:
        raise InvalidParameter(" ".join(str(error).split())) from error


def _combine(
    model: PreTrainedModel, config: GenerationConfig | None, given: Mapping[str, Any]
) -> tuple[GenerationConfig, dict[str, Any], tuple[bool, bool]]:
    """The call beats the given config, which beats the model's. Returns what is left, and which lengths nobody gave."""
    if config is not None:
        unknown = sorted(set(vars(config)) - set(vars(GenerationConfig())) - set(vars(model.generation_config)))
        unknown = [name for name in unknown if not name.startswith("_")]
        if unknown:
            raise InvalidParameter(f"generation_config has {unknown[0]!r}, which means nothing: take it out")
    sources = [config, model.generation_config]
    default_lengths = tuple(
        given.get(name) is None and all(getattr(source, name, None) is None for source in sources)
        for name in ("max_length", "min_length")
    )
    combined, leftovers = model._prepare_generation_config(config, **given)
    return combined, dict(leftovers), (default_lengths[0], default_lengths[1])


def _set_lengths(
    model: PreTrainedModel, config: GenerationConfig, input_ids: torch.Tensor, default_lengths: tuple[bool, bool]
) -> None:
    """Makes max_length and min_length of the config those of this call."""
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_lengths[0],
        has_default_min_length=default_lengths[1],
        model_input_name="input_ids",
        input_ids_length=input_ids.shape[1],
        inputs_tensor=input_ids,
    )
    model._validate_generated_length(config, input_ids.shape[1], default_lengths[0])


def _make_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: torch.Tensor,
    mask: torch.Tensor | None,
    own: LogitsProcessorList,
    prefix_function: Callable[[int, torch.Tensor], list[int]] | None,
) -> LogitsProcessorList:
    """The logits processors of one sequence [1, L], in transformers' order."""
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        prefix_allowed_tokens_fn=prefix_function,
        logits_processor=own,
        device="cpu",
        model_kwargs={"attention_mask": mask},
    )
