"""`accelerate`: a model of transformers whose `generate` takes the same arguments, gives the same text, and is faster.

fast = outpace.accelerate(model, tokenizer)
output = fast.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from outpace.accelerated.arguments import GenerateCall, check_transformers, read_call
from outpace.accelerated.assembly import Assembled, assemble, read_speculative
from outpace.accelerated.rows import Row, run_rows
from outpace.config import EngineConfig
from outpace.engine.outputs import RequestStats
from outpace.errors import InvalidParameter, OutpaceError, UnsupportedModel
from outpace.models.hf_bits import probe_rows

__all__ = ["AcceleratedModel", "accelerate"]

_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cache_tokens",
    "speculative_control",
    "speculative_floor",
)


def accelerate(
    model: PreTrainedModel,
    tokenizer: Any = None,
    *,
    speculative_config: Any = None,
    assistant_model: Any = None,
    **options: Any,
) -> AcceleratedModel:
    """Wraps a model of transformers. The model itself is not changed, and goes on working as before.

    Args:
        model: a decoder-only model on the CPU.
        tokenizer: its tokenizer: for stop strings, and to compare vocabularies with a draft model's files.
        speculative_config: `auto` (the default: suffix lookup, and how much of it pays is learnt), `suffix`, `ngram`,
            a draft model (hub id, folder, GGUF file), `none`, a mapping with the keys of SpeculativeConfig, or a
            SpeculativeConfig.
        assistant_model: a draft model: a PreTrainedModel with the same vocabulary, or a name as above.
        options: max_model_len (most tokens of prompt and output), max_num_seqs (most sequences side by side),
            max_num_batched_tokens (most rows a step), cache_tokens (most cached tokens), speculative_control and
            speculative_floor, as in EngineConfig.

    Raises:
        UnsupportedModel: a model that cannot be run with the same text, naming why.
        InvalidParameter: options that are impossible or contradict each other.
        VocabularyMismatch: the draft model's tokens are not the target's.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise InvalidParameter(f"accelerate has no option {unknown[0]!r}; known: {', '.join(_OPTIONS)}")
    speculative, assistant = read_speculative(speculative_config, assistant_model)
    config = EngineConfig(**options)
    if isinstance(model, PreTrainedModel):
        check_transformers(model)
    return AcceleratedModel(model, tokenizer, assemble(model, tokenizer, speculative, assistant, config))


class AcceleratedModel:
    """A model of transformers with a faster `generate`; everything else is the model's own. Made by `accelerate`.

    Calls from several threads wait for each other; the prompts of one call are computed side by side.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, parts: Assembled) -> None:
        own = {
            "wrapped_model": model,
            "last_stats": [],
            "_tokenizer": tokenizer,
            "_parts": parts,
            "_threads": torch.get_num_threads(),
            "_lock": threading.RLock(),
            "_busy": False,
        }
        self.__dict__.update(own)

    wrapped_model: PreTrainedModel
    """The model as it was given."""
    last_stats: list[RequestStats]
    """What speculation did in the last call, sequence by sequence."""
    _tokenizer: Any
    _parts: Assembled
    _threads: int
    _lock: threading.RLock
    _busy: bool

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapped_model", "__setstate__"):  # while a copy is being made there is no model yet
            raise AttributeError(name)
        return getattr(self.wrapped_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is an attribute of the model: set it there, as fast.wrapped_model.{name} = ...")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self.wrapped_model(*args, **kwargs)

    def __repr__(self) -> str:
        return f"accelerated ({self._parts.target.describe()}) {self.wrapped_model!r}"

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate: Any = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Continues prompts as transformers' `generate` does, with its arguments and their meaning.

        Greedy text is the model's own. Sampled text has the same distribution; without `seed` it follows
        `torch.manual_seed`, though not with the numbers that transformers draws. Logits processors and stopping
        criteria see one sequence at a time, and processors have to be pure functions of (ids, scores): they are also
        asked about draft tokens.

        Args:
            inputs: [B, L] token ids, padding on the left; also as `input_ids`.
            seed: of the noise; None draws one from torch's global generator.
            kwargs: `attention_mask`, `tokenizer`, and settings of a GenerationConfig.

        Returns:
            [B * num_return_sequences, length] int64 prompts and what follows, filled up with the pad id; with
            return_dict_in_generate that and, if asked for, logits and scores: one [B * num_return_sequences, V] float32
            tensor a token, zeros behind the end of a sequence.

        Raises:
            InvalidParameter: an argument that is impossible, unknown or cannot be honoured; names it.
            InvalidPrompt: prompts that cannot be continued.
            OutpaceError: something failed on the way, a logits processor for one.
        """
        arguments = {
            "inputs": inputs,
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "assistant_model": assistant_model,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
            "seed": seed,
            **kwargs,
        }
        with self._lock:
            if self._busy:
                raise OutpaceError("generate was called from inside generate: a processor or streamer must not do that")
            self.__dict__["_busy"] = True
            try:
                return self._generate(arguments)
            finally:
                self.__dict__["_busy"] = False

    def _generate(self, arguments: dict[str, Any]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        model, parts = self.wrapped_model, self._parts
        _check_ready(model)
        parts.target.refresh()
        call = read_call(model, self._tokenizer, arguments, vocab_size=parts.target.vocab_size, methods=parts.methods)
        assert parts.config.max_model_len is not None
        _check_room(call, parts.config.max_model_len)
        if torch.get_num_threads() != self._threads:  # bits of rows were looked at with another number
            probe_rows(parts.target)
            self.__dict__["_threads"] = torch.get_num_threads()
        rows = run_rows(parts.engine, call)
        self.__dict__["last_stats"] = [row.request.stats for row in rows]
        sequences = _sequences(call, rows)
        if not call.config.return_dict_in_generate:
            return sequences
        width = parts.target.vocab_size
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_by_token([row.processing.scores for row in rows], rows, width)
            if call.config.output_scores
            else None,
            logits=_by_token([row.processing.logits for row in rows], rows, width)
            if call.config.output_logits
            else None,
        )


def _check_ready(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        raise UnsupportedModel(f"the model was moved to {model.device}: move it back with model.to('cpu')")
    if model.training or any(isinstance(m, torch.nn.Dropout) and m.training and m.p for m in model.modules()):
        raise UnsupportedModel("the model is in training mode, where dropout may change its text: call model.eval()")


def _check_room(call: GenerateCall, max_model_len: int) -> None:
    longest = max(len(call.prompt_token_ids(row)) for row in range(0, call.num_rows, call.copies))
    if longest + call.max_new_tokens > max_model_len:
        raise InvalidParameter(
            f"a prompt of {longest} tokens and {call.max_new_tokens} new ones do not fit the context of "
            f"{max_model_len}: set max_new_tokens to at most {max(0, max_model_len - longest)}, or give accelerate a "
            "max_model_len that the model can compute"
        )


def _sequences(call: GenerateCall, rows: Sequence[Row]) -> torch.Tensor:
    """[rows, length] prompts with their padding, what follows, and the pad id behind it."""
    ends = [row.end or 0 for row in rows]
    start = call.input_ids.shape[1]
    sequences = torch.full((len(rows), start + max(ends)), call.pad_id or 0, dtype=torch.int64, device="cpu")
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        sequences[index, :start] = call.prompt(index)[0]
        sequences[index, start : start + end] = torch.tensor(row.output_ids[:end], dtype=torch.int64, device="cpu")
    return sequences


def _by_token(kept: Sequence[dict[int, torch.Tensor]], rows: Sequence[Row], width: int) -> tuple[torch.Tensor, ...]:
    """One [rows, V] tensor a token, zeros behind the end of a sequence."""
    nothing = torch.zeros(width, dtype=torch.float32, device="cpu")
    ends = [row.end or 0 for row in rows]
    return tuple(
        torch.stack([values[at] if at < end else nothing for values, end in zip(kept, ends, strict=True)])
        for at in range(max(ends))
    )
