"""Everything about a model that is on disk, found and opened: configs, tokenizer, source of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from outpace.errors import CheckpointError, InvalidParameter
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.gguf import convert_gguf
from outpace.models.memory import available_bytes, estimate_bytes, require_fit
from outpace.models.mtp_config import mtp_tensors
from outpace.models.resolve import resolve_model
from outpace.models.tokenizer import Tokenizer
from outpace.params import SamplingDefaults, SamplingParams

__all__ = ["LoadedFiles", "available_bytes", "estimate_bytes", "load_files", "require_fit"]

Front = Literal["cli", "api"]

_CLI_MAX_TOKENS = 512
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SAMPLED_ROWS = 64
_SAME_DIRECTION = 0.9  # cosine; four bits a weight keep about 0.99 of it


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """A model's files, opened; no weight is in memory yet.

    Args:
        label: the model's name for people.
        folder: where its files are (of a GGUF file: the converted copy).
        config: `config.json`.
        generation_config: `generation_config.json`, empty if there is none (a GGUF file has none).
        tokenizer: its tokenizer.
        checkpoint: its weights, to be read one by one.
        eos_ids: ids that end generation: the union of what both configs and the tokenizer name.
    """

    label: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    eos_ids: frozenset[int]

    def checked_shape(self) -> DecoderConfig:
        """The decoder that the config describes, after every stored tensor was held against it.

        Raises:
            UnsupportedModel: an architecture or feature that the decoder does not run.
            CheckpointError: an impossible value in the config, or tensors that are not those it describes.
        """
        shape = DecoderConfig.from_hf(self.config, self.folder / "config.json")
        self.checkpoint.check(expected_tensors(shape), mtp_tensors(shape))
        return shape

    def decoder_weights(self, shape: DecoderConfig) -> Checkpoint:
        """The tensors without those of MTP layers, which are loaded only where one drafts."""
        others = mtp_tensors(shape)
        return self.checkpoint.select({name: name for name in self.checkpoint.shapes if name not in others})

    def num_parameters(self, shape: DecoderConfig) -> int:
        """How many weights the model has, each counted once.

        Files of models whose head is their embedding often hold it twice: as it is, or (GGUF) with the head quantised
        on its own, which the decoder then runs as stored. Both are the same parameters.

        Args:
            shape: as from `checked_shape`.
        """
        counts = {name: prod(size) for name, size in expected_tensors(shape).items()}
        if _HEAD in counts and _is_copy(self.checkpoint):
            del counts[_HEAD]
        return sum(counts.values())

    def sampling_defaults(self, front: str) -> SamplingDefaults:
        """What sampling parameters left at None mean for this model.

        The generation config decides where it says something (`do_sample: false` is greedy); else text is greedy in
        the CLI and sampled at temperature 1 in the API. The CLI ends after 512 tokens, the API at the context's end.

        Raises:
            InvalidParameter: another front.
            CheckpointError: the generation config has a value that is not possible.
        """
        if front not in get_args(Front):
            raise InvalidParameter(f"front={front!r} is not possible: {' or '.join(get_args(Front))}")
        given = {key: value for key, value in self.generation_config.items() if value is not None}
        if given.get("do_sample") is False:
            temperature = 0.0
        else:
            unsaid = 1.0 if front == "api" or given.get("do_sample") else 0.0
            temperature = given.get("temperature", unsaid)
        names = ("top_p", "top_k", "min_p", "repetition_penalty")
        try:
            params = SamplingParams(temperature=temperature, **{name: given[name] for name in names if name in given})
        except InvalidParameter as error:
            raise CheckpointError(f"{self.folder / 'generation_config.json'}: {error}") from error
        filled = params.resolved(SamplingDefaults())
        return SamplingDefaults(
            **{name: getattr(filled, name) for name in ("temperature", *names)},
            max_tokens=_CLI_MAX_TOKENS if front == "cli" else None,
        )


def load_files(
    name: str,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    notify: Callable[[str], None] | None = None,
) -> LoadedFiles:
    """Finds a model and opens its files; a GGUF file is converted first, once.

    Args:
        name: alias, folder, GGUF file or hub id.
        allow_pickle: read `.bin` weights if there are no safetensors.
        trust_remote_code: run Python code shipped with the tokenizer.
        notify: told in lines what takes long.

    Raises:
        ModelNotFound: no such model.
        CheckpointError: damaged or incomplete files.
        UnsupportedModel: a feature that outpace does not run.
    """
    found = resolve_model(name, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    folder = convert_gguf(found.path, notify or _say_nothing) if found.is_gguf else found.path
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation_config = read_json(generation_file) if generation_file.is_file() else {}
    checkpoint = Checkpoint.open(folder, allow_pickle=allow_pickle)
    tokenizer = Tokenizer.from_folder(folder, trust_remote_code=trust_remote_code, label=found.label)
    eos_ids = tokenizer.eos_ids.union(_ids(folder / "config.json", config), _ids(generation_file, generation_config))
    return LoadedFiles(found.label, folder, config, generation_config, tokenizer, checkpoint, eos_ids)


def _is_copy(checkpoint: Checkpoint) -> bool:
    """Whether head and embedding are the same but for quantisation: independent rows are near orthogonal."""
    head, embedding = (_sample_rows(checkpoint, name) for name in (_HEAD, _EMBEDDING))
    return bool(F.cosine_similarity(head, embedding).median() > _SAME_DIRECTION)


def _sample_rows(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Some rows of a matrix, spread over it, in float32; no others are read."""
    blocks = checkpoint.blocks(name)
    count = checkpoint.shapes[name][0]
    rows = torch.arange(0, count, max(1, count // _SAMPLED_ROWS), dtype=torch.int64, device="cpu")
    if blocks is None:
        return checkpoint.get(name)[rows].float()
    return torch.cat([blocks.dequantize(row, row + 1) for row in rows.tolist()])


def _say_nothing(message: str) -> None:
    """Takes a message nobody wants."""


def _ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """EOS ids of a config: one, a list, or none."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise CheckpointError(f"{path}: eos_token_id={value!r} is not possible: it must be token ids")
    return frozenset(ids)
