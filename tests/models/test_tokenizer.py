"""Encoding, chat templates, incremental text, vocabularies compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from outpace.errors import BadInput, CheckpointError, InvalidPrompt, VocabularyMismatch
from outpace.models.load import LoadedFiles
from outpace.models.tokenizer import Detokenizer, Tokenizer, TokenizerSettings, check_same_vocabulary
from tests.models.tiny_tokenizers import MAKERS, byte_level, sentencepiece

TOKENIZERS = {name: Tokenizer(make()) for name, make in MAKERS.items()}
TEXTS = [
    "hello",
    "  two  spaces",
    " hell",
    "naïve café",
    "😀👩‍👩‍👧",
    "a\n\nb\t",
    "1234",
    "",
    "▁",
    "def f(x):\n    return x ** 2\n",
]
SAY = [{"role": "user", "content": "hell"}]
WRITES_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}o{% endif %}"
)
NO_BOS = WRITES_BOS.removeprefix("{{ bos_token }}")


def with_template(template: str, *, backend: Backend | None = None) -> Tokenizer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend or byte_level(), TokenizerSettings(named, {"default": template}), "tiny")


# --- text as it grows


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join([detokenizer.push(index) for index in ids]) + detokenizer.flush()


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "sentencepiece without prefix"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    # SentencePiece writes a space as that letter, so the two cannot be told apart afterwards.
    wanted = text if name == "byte-level" else text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode(text)) == wanted
    assert stream(tokenizer, tokenizer.encode(text), True) == wanted


def test_unfinished_characters_are_held_back_and_shown_broken_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("😀")
    assert len(ids) == 2  # three bytes in one token, then the fourth
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(index) for index in ids] == ["", "😀"]
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer.push(ids[0]), detokenizer.flush()) == ("", "\ufffd")


def test_byte_fallback_runs_end_with_the_next_piece() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("a😀o")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(index) for index in ids] == ["", "a", "", "", "", "", "😀o"]


def test_only_the_first_leading_space_is_taken_away() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hell = tokenizer.vocab["▁hell"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(hell), detokenizer.push(hell)] == ["hell", " hell"]


def test_special_tokens_are_shown_only_on_request() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [0, *tokenizer.encode("hell<tool> é"), 1]
    assert stream(tokenizer, ids, True) == "hell<tool> é" == tokenizer.decode(ids)
    assert stream(tokenizer, ids, False) == "<s>hell<tool> é</s>" == tokenizer.decode(ids, skip_special_tokens=False)


# --- BOS and chat templates


@pytest.mark.parametrize("adds", [True, False])
def test_bos_comes_first_iff_the_tokenizer_adds_it(adds: bool) -> None:
    tokenizer = with_template(NO_BOS, backend=byte_level(bos=adds))
    bos = [0] if adds else []
    # The </s> that the post-processor puts behind is left out: the text goes on.
    assert tokenizer.encode("hell") == [*bos, tokenizer.vocab["hell"]]
    assert tokenizer.encode("") == bos
    assert tokenizer.encode("<s>hell") == [0, tokenizer.vocab["hell"]]


@pytest.mark.parametrize("template", [WRITES_BOS, NO_BOS])
@pytest.mark.parametrize("adds", [True, False])
def test_chat_has_bos_exactly_once(template: str, adds: bool) -> None:
    tokenizer = with_template(template, backend=byte_level(bos=adds))
    hell, o = tokenizer.vocab["hell"], tokenizer.vocab["o"]
    bos = [0] if adds or template is WRITES_BOS else []
    assert tokenizer.encode_chat(SAY) == [*bos, hell, o]


def test_template_options_are_handed_on() -> None:
    tokenizer = with_template("{{ mood }}" + NO_BOS)
    assert tokenizer.render_chat(SAY, mood="b", add_generation_prompt=False) == "bhell"


def test_model_without_a_template_says_what_works() -> None:
    with pytest.raises(BadInput, match="the model has no chat template: use generate"):
        TOKENIZERS["byte-level"].encode_chat(SAY)
    assert not TOKENIZERS["byte-level"].has_chat_template


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            SAY,
            "tiny cannot render these messages: roles must alternate",
        ),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "cannot render these messages"),
        ("{{ messages[5].content }}", SAY, "cannot render these messages"),
        ("{% for %}", SAY, "cannot render these messages"),
        ("{% for i in range(100000000) %}{% endfor %}", SAY, "cannot render these messages: Range too big"),
        ("{{ 1 / 0 }}", SAY, "cannot render these messages: division by zero"),
        (NO_BOS, [], "messages is empty"),
        (NO_BOS, "hi", "messages must be a list"),
        (NO_BOS, [{"content": "hi"}], "messages must be a list"),
        (NO_BOS, ["hi"], "messages must be a list"),
    ],
)
def test_what_a_template_cannot_render_is_bad_input(template: str, messages: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        with_template(template).encode_chat(messages)


def test_prompts_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidPrompt, match="surrogate pair at character 1"):
        TOKENIZERS["byte-level"].encode("a\ud83d")
    with pytest.raises(InvalidPrompt, match="must be a string, not bytes"):
        TOKENIZERS["byte-level"].encode(b"a")  # type: ignore[arg-type]


# --- folders


def write_folder(folder: Path, config: dict[str, Any], backend: Backend | None = None) -> Path:
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_names_tokens_template_and_bos(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": NO_BOS}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config, byte_level(bos=True)))
    assert tokenizer.eos_ids == {1} and tokenizer.special_ids == {0, 1} and tokenizer.label == tmp_path.name
    assert tokenizer.encode_chat(SAY)[0] == 0
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert Tokenizer.from_folder(tmp_path).render_chat(SAY) == "the file wins"


def test_named_templates_are_chosen_by_use(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": templates}))
    assert tokenizer.render_chat(SAY) == "plain"
    assert tokenizer.render_chat(SAY, tools=[{"type": "function"}]) == "1 tools"


def test_padding_and_truncation_in_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {}, backend))
    assert len(tokenizer.encode("aaaa")) == 4


def test_tokens_only_the_config_knows_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    entry = {"content": "<extra>", "special": True, "normalized": False}
    config = {"eos_token": "<extra>", "added_tokens_decoder": {str(size): entry}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert tokenizer.encode("a<extra>")[1:] == [size] and tokenizer.eos_ids == {size}
    assert tokenizer.vocab_size == size + 1 and size in tokenizer.special_ids


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_same_ids_as_transformers_reads_from_the_same_folder(tmp_path: Path, name: str, add_bos_token: bool) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": add_bos_token,
        "chat_template": WRITES_BOS,
    }
    mine = Tokenizer.from_folder(write_folder(tmp_path, config, MAKERS[name]()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert mine.encode(text) == theirs(text)["input_ids"]
        assert mine.decode(mine.encode(text)) == theirs.decode(mine.encode(text), skip_special_tokens=True)
    chat = theirs.apply_chat_template(SAY, add_generation_prompt=True, return_dict=False)
    assert mine.encode_chat(SAY) == chat
    assert mine.eos_ids == {theirs.eos_token_id}


def test_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    backend = byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello") == TOKENIZERS["byte-level"].encode("hello")
    assert tokenizer.eos_ids == {1}


def test_missing_or_damaged_tokenizer_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path.name} has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("<html>")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": 5},
        {"added_tokens_decoder": {"first": {"content": "x"}}},
        {"added_tokens_decoder": {"9999": "<new>"}},
        {"chat_template": ["{{ x }}"]},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_damaged_settings_name_the_file(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.from_folder(write_folder(tmp_path, config))


def test_template_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_that_is_code_runs_only_when_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}})
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise LookupError('own words')")
    with pytest.raises(CheckpointError, match=r"trust_remote_code=True \(--trust-remote-code\)"):
        Tokenizer.from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"no other tokenizer that loads \(own words\)"):
        Tokenizer.from_folder(tmp_path, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


# --- vocabularies


def changed(*, rename: dict[str, str] | None = None, extra: list[AddedToken] | None = None) -> Tokenizer:
    state = json.loads(byte_level().to_str())
    for old, new in (rename or {}).items():
        state["model"]["vocab"][new] = state["model"]["vocab"].pop(old)
    state["model"]["merges"] = [] if rename else state["model"]["merges"]
    backend = Backend.from_str(json.dumps(state))
    backend.add_tokens(extra or [])
    return Tokenizer(backend, label="other")


def test_equal_vocabularies_pass_and_added_tokens_of_one_side_too() -> None:
    target = Tokenizer(byte_level(), label="target")
    check_same_vocabulary(target, changed())
    longer = changed(extra=[AddedToken("<think>", special=True)])
    check_same_vocabulary(target, longer)
    check_same_vocabulary(longer, target)


def test_one_different_token_is_named_with_its_id() -> None:
    target = Tokenizer(byte_level(), label="target")
    index = target.vocab["hell"]
    with pytest.raises(VocabularyMismatch, match=rf"other cannot draft for target: id {index} is 'hell' .* 'help'"):
        check_same_vocabulary(target, changed(rename={"hell": "help"}))


def test_ordinary_token_of_one_side_only_is_refused() -> None:
    small, large = Tokenizer(sentencepiece(), label="small"), None
    state = json.loads(sentencepiece().to_str())
    state["model"]["vocab"]["hello"] = small.vocab_size
    large = Tokenizer(Backend.from_str(json.dumps(state)), label="large")
    with pytest.raises(VocabularyMismatch, match=f"id {small.vocab_size} is no token in the target's .*, 'hello' in"):
        check_same_vocabulary(small, large)
    with pytest.raises(VocabularyMismatch, match=f"id {small.vocab_size} is 'hello' in the target's .*, no token in"):
        check_same_vocabulary(large, small)


def test_same_size_is_not_enough() -> None:
    swapped = changed(rename={"hell": "tmp"})
    assert swapped.vocab_size == TOKENIZERS["byte-level"].vocab_size
    with pytest.raises(VocabularyMismatch):
        check_same_vocabulary(TOKENIZERS["byte-level"], swapped)


# --- the real thing

SMOLLM2_IDS = {
    # Facts of the published tokenizer: single ids for control tokens, digits one by one.
    "Hello, world!": [19556, 28, 905, 17],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "2024": [34, 32, 34, 36],
    "<|endoftext|>": [0],
}


@pytest.mark.smollm2
@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_gives_the_published_ids(smollm2_files: LoadedFiles, text: str) -> None:
    assert smollm2_files.tokenizer.encode(text) == SMOLLM2_IDS[text]


@pytest.mark.smollm2
@pytest.mark.parametrize("text", [*TEXTS, "x" * 1000, "日本語のテキスト。", "e\u0301", "\x00\x7f\ufffd"])
def test_smollm2_round_trip(smollm2_files: LoadedFiles, text: str) -> None:
    tokenizer = smollm2_files.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and stream(tokenizer, ids, True) == text


@pytest.mark.smollm2
def test_smollm2_chat_is_the_template_in_the_file(smollm2_files: LoadedFiles) -> None:
    tokenizer = smollm2_files.tokenizer
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [index for index in ids if index in (1, 2)] == [1, 2, 1, 2, 1]
    assert tokenizer.vocab_size == 49_152 and tokenizer.eos_ids == {2}
