"""Text to token ids and back, chat templates, and whether two models mean the same by an id.

A `tokenizer.json` is read by the tokenizers library directly, as it stands: transformers rebuilds some tokenizers by
the class name in the config, and importing its classes costs more than a second. It is asked where a model has no
`tokenizer.json` or ships its own code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from outpace.errors import BadInput, CheckpointError, InvalidPrompt, UnsupportedModel, VocabularyMismatch
from outpace.models.chat_template import render_template
from outpace.models.checkpoint import first_line, read_json
from outpace.models.detokenizer import stream_maker

__all__ = ["Detokenizer", "Tokenizer", "TokenizerSettings", "check_same_vocabulary"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a tokenizer's config says beside its `tokenizer.json`.

    Args:
        named: text of the named special tokens, as {"bos_token": "<s>"}; chat templates see them.
        templates: chat templates by name; the usual one is "default".
    """

    named: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """One model's tokenizer.

    Args:
        backend: the tokenizer proper; padding and truncation in it are switched off.
        settings: named tokens and templates.
        label: the model's name, for messages.

    Raises:
        UnsupportedModel: its decoder cannot be run token by token.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings | None = None, label: str = "the model") -> None:
        self.label = label
        self._settings = settings or TokenizerSettings()
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        self._new_stream = stream_maker(backend)
        self._prefix = self._find_prefix()

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False, label: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a model folder.

        Args:
            folder: holds `tokenizer.json`, or files that transformers can make one of.
            trust_remote_code: run the tokenizer's own Python code if it ships some.
            label: the model's name, for messages.

        Raises:
            CheckpointError: no tokenizer, a damaged one, or one that is code which was not allowed to run.
            UnsupportedModel: a tokenizer without a fast version, or with an unusual decoder.
        """
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        own_code = "AutoTokenizer" in str(config.get("auto_map"))
        if not (folder / "tokenizer.json").is_file() or (own_code and trust_remote_code):
            return cls(*_from_transformers(folder, trust_remote_code), label=label or folder.name)
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read ({error}): download it again") from error
        try:
            settings = _read_settings(folder, config)
            _add_missing_tokens(backend, settings, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{config_file} is damaged ({error!r}): download it again") from error
        return cls(backend, settings, label or folder.name)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of every token, added ones included."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1. Rows of the model beyond it are padding."""
        return max(self.vocab.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids left out of text when special tokens are skipped."""
        return frozenset(index for index, token in self._added.items() if token.special or self._is_skipped(index))

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The id the tokenizer itself names as the end of a sequence, if it does."""
        token = self._settings.named.get("eos_token")
        index = None if token is None else self._backend.token_to_id(token)
        return frozenset() if index is None else frozenset([index])

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """By name; the usual one is "default"."""
        return self._settings.templates

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with this chat template alone."""
        changed = copy(self)
        changed._settings = replace(self._settings, templates={"default": template})
        return changed

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with BOS in front iff this tokenizer puts one there (and only once).

        What a post-processor would put *behind* a text (EOS) is left out: the text is to be continued.

        Raises:
            InvalidPrompt: the text is no text, or is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidPrompt(f"a prompt must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(
                f"the prompt is not valid Unicode: half a surrogate pair at character {error.start}"
            ) from error
        ids = self.encode_piece(text)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def encode_piece(self, text: str) -> list[int]:
        """Token ids of valid Unicode with nothing added; special tokens written out in it become those tokens."""
        # As a batch of one: other threads can run meanwhile, which a long text would stop for seconds.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the assistant's turn.

        BOS comes exactly once if the template writes it, the tokenizer adds it, or both.

        Args:
            messages: {"role": ..., "content": ...} each, at least one.
            template_kwargs: what the template takes, as `tools`, `add_generation_prompt=False`, `enable_thinking`.

        Raises:
            BadInput: no template, no messages, or the template cannot render them.
        """
        return self.encode(self.render_chat(messages, **template_kwargs))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The text `encode_chat` encodes.

        Raises:
            BadInput: no template, no messages, or the template cannot render them.
        """
        templates = self._settings.templates
        if not templates:
            raise BadInput(f"{self.label} has no chat template: use generate with a plain prompt")
        if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise BadInput('messages must be a list of {"role": ..., "content": ...}')
        if not messages:
            raise BadInput("messages is empty: give at least one message")
        name = "tool_use" if template_kwargs.get("tools") and "tool_use" in templates else "default"
        template = templates.get(name) or next(iter(templates.values()))
        options = {"add_generation_prompt": True, **self._settings.named, **template_kwargs}
        conversation = [{key: item for key, item in message.items() if item is not None} for message in messages]
        try:
            return render_template(template, conversation, **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise BadInput(
                f"the chat template of {self.label} cannot render these messages: {first_line(error)}"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token have none."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> Detokenizer:
        """A fresh `Detokenizer` for one request."""
        return Detokenizer(self, skip_special_tokens, spaces_between_special_tokens, after)

    def to_json(self) -> str:
        """The tokenizer proper, as text of a `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for an id without one."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        """Tokens left out when special tokens are skipped. `decode` goes by the token; two ids may have the same."""
        return frozenset(token for index in self.special_ids if (token := self.token(index)) is not None)

    def _is_skipped(self, token_id: int) -> bool:
        """Whether `decode` takes a token as special, whatever its flag says: a token can be added twice."""
        return self.decode([token_id]) != self.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        return added

    def _find_prefix(self) -> list[int]:
        """Ids that come before every text, by what the post-processor does to a sample.

        `add_bos_token` in a config says nothing here: where there is a `tokenizer.json`, its post-processor decides (as
        in transformers 5).
        """
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                prefix: list[int] = full[:start]
                return prefix
        return []


class Detokenizer:
    """Text of one request as its tokens arrive: append-only, and joined exactly what `Tokenizer.decode` gives.

    Args:
        tokenizer: whose tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False: where special tokens are shown and the decoder puts spaces between tokens,
            none between two neighbours that were both added to the vocabulary, as special tokens are.
        after: tokens before the text that are not part of it (the end of a prompt). A text that goes on keeps its
            first space, which a decoder takes off the beginning of all text; then it is not what `decode` gives.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_texts if skip_special_tokens else frozenset()
        self._tight = tokenizer._added if not (skip_special_tokens or spaces_between_special_tokens) else {}
        self._after_added = False
        self._stream = tokenizer._new_stream()
        self._before = ""
        for token_id in after:
            self._push(token_id)
        if after:
            self._before = deepcopy(self._stream).flush()  # of those tokens, and comes out with what follows

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        return self._own(self._push(token_id))

    def flush(self) -> str:
        """What was held back, at the end: bytes that never became a character show as U+FFFD."""
        return self._own(self._stream.flush())

    def _own(self, text: str) -> str:
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        return text

    def _push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None or token in self._skipped:
            return ""
        text = self._stream.push(token)
        added = token_id in self._tight
        if added and self._after_added and text == " " + token:
            text = token
        self._after_added = added
        return text


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Makes sure that both models mean the same token by every id both have.

    Sizes are not compared: padded heads differ, and padding is in no vocabulary. An id that only one of them has is
    let pass if its token was added there (special tokens of a finetune): the drafter treats it as unknown. An ordinary
    token that only one has means that the text is split differently, and is refused.

    Raises:
        VocabularyMismatch: naming an example id and both tokens.
    """
    ours, theirs = ({index: token for token, index in model.vocab.items()} for model in (target, draft))
    if ours == theirs:
        return
    for index in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(index), theirs.get(index)
        if mine == other:
            continue
        alone = target if other is None else draft if mine is None else None
        if alone is not None and index in alone._added:
            continue
        raise VocabularyMismatch(
            f"{draft.label} cannot draft for {target.label}: id {index} is {_quoted(mine)} in the target's vocabulary, "
            f"{_quoted(other)} in the draft model's; take a draft model of the same family"
        )


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _from_transformers(folder: Path, trust_remote_code: bool) -> tuple[Backend, TokenizerSettings]:
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        slow = auto.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # files of many makers, and their own code where it is trusted: it may raise anything
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise CheckpointError(
                f"{folder}: its tokenizer is Python code of its own, which runs only when allowed: "
                "read that code, then give trust_remote_code=True (--trust-remote-code)"
            ) from error
        raise CheckpointError(
            f"{folder} has no tokenizer.json and no other tokenizer that loads ({first_line(error)})"
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedModel(f"the tokenizer in {folder} has no fast version ({type(slow).__name__})")
    template = slow.chat_template
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    named = {name: str(token) for name, token in slow.special_tokens_map.items() if isinstance(token, str)}
    return backend, TokenizerSettings(named, templates)


def _read_settings(folder: Path, config: Mapping[str, Any]) -> TokenizerSettings:
    older = folder / "special_tokens_map.json"
    sources = [read_json(older) if older.is_file() else {}, config]
    named = {name: text for source in sources for name in _NAMED if (text := _text_of(source.get(name))) is not None}
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {str(item["name"]): str(item["template"]) for item in template}
    else:
        templates = {"default": str(template)} if template else {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            templates["default"] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as UTF-8 text ({error}): download it again") from error
    return TokenizerSettings(named, templates)


def _text_of(token: Any) -> str | None:
    """A token in a config is its text, or an object with the text as its content."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: Backend, settings: TokenizerSettings, config: Mapping[str, Any]) -> None:
    """Adds tokens that only the config knows, in the order of their ids, and marks the named ones as special."""
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for _, entry in listed:
        text = _text_of(entry)
        if text is not None and backend.token_to_id(text) is None:
            special = bool(entry.get("special", False))
            flags = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
            (backend.add_special_tokens if special else backend.add_tokens)(
                [AddedToken(text, special=special, **flags)]
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(settings.named.values()) if text not in known]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
