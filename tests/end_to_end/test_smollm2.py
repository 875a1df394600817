"""The packaged SmolLM2-135M-Instruct through the Python front: same tokens, right logits, honest books."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from outpace import LLM, InvalidParameter, InvalidPrompt, OutOfMemory, SamplingParams, SpeculationParams
from outpace.control.controller import AdaptiveController
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.load import LoadedFiles
from tests.models.tiny_models import DictWeights, lanes, pack_of, precision

pytestmark = pytest.mark.smollm2

EDIT = """Rename x to total and print the function again.
def add(a, b):
    x = a + b
    print(x)
    return x"""
CONVERSATIONS = [
    [{"role": "user", "content": EDIT}],
    [{"role": "user", "content": "Name three rivers."}],
    [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "What is 12 + 30? " * 12}],
]
METHODS = ("ngram", "early_exit", "draft_model")
PLAIN = SpeculationParams(enabled=False)


@pytest.fixture(scope="session")
def shallow(smollm2_files: LoadedFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its last two layers: a draft model that is often right and often wrong."""
    folder = tmp_path_factory.mktemp("shallow")
    layers = smollm2_files.config["num_hidden_layers"] - 2
    kept = {
        name: smollm2_files.checkpoint.get(name)
        for name in smollm2_files.checkpoint.shapes
        if not name.startswith((f"model.layers.{layers}.", f"model.layers.{layers + 1}."))
    }
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**smollm2_files.config, "num_hidden_layers": layers}))
    for path in smollm2_files.folder.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module", params=["auto", "none"])
def llm(request: pytest.FixtureRequest, shallow: Path) -> LLM:
    """All three drafters on one engine, on native kernels."""
    drafters = ["ngram", "self:28", str(shallow)]
    options = {"quantization": request.param, "threads": 1, "max_model_len": 1024, "speculative_control": "fixed"}
    return LLM("smollm2-135m", drafters, kernels="native", **options)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=0.7, seed=7, max_tokens=12)],
    ids=["greedy", "T=0.7"],
)
@pytest.mark.thinned(2)
def test_same_tokens_for_every_drafter_alone_and_in_a_batch(llm: LLM, params: SamplingParams) -> None:
    assert_same_tokens(llm, params, METHODS)


def test_same_tokens_on_torch() -> None:
    llm = LLM("smollm2-135m", ["ngram", "self:28"], kernels="torch", threads=1, speculative_control="fixed")
    assert "7-bit weights, 8-bit activations" in llm.banner()
    assert_same_tokens(llm, SamplingParams(temperature=0.0, max_tokens=10), ("ngram", "early_exit"))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.thinned(2)
def test_a_controller_that_learns_changes_no_token(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    plain = [llm.chat(messages, params, PLAIN)[0] for messages in CONVERSATIONS]
    before = llm.engine.steering.controller
    llm.engine.steering.controller = controller = AdaptiveController()
    try:
        for _ in range(2):
            for alone, output in zip(plain, llm.chat(CONVERSATIONS, params), strict=True):
                assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    finally:
        llm.engine.steering.controller = before
    assert sum(found.drafts for found in controller.report().drafters.values()) > 0


def assert_same_tokens(llm: LLM, params: SamplingParams, methods: Sequence[str]) -> None:
    plain = [llm.chat(messages, params, PLAIN)[0] for messages in CONVERSATIONS]
    for method in methods:
        together = llm.chat(CONVERSATIONS, params, SpeculationParams(method=method, num_speculative_tokens=3))
        for alone, output in zip(plain, together, strict=True):
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert output.text == alone.text
        drafted = sum(output.stats.draft_tokens for output in together)
        accepted = sum(output.stats.accepted_tokens for output in together)
        least = 0 if method == "ngram" else drafted / 5
        assert least < accepted < drafted, "drafts that are all right or all wrong prove nothing"


@pytest.mark.thinned(2)
def test_a_stream_joins_to_the_text_and_two_can_be_read_in_turn(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    whole = [llm.chat(messages, params)[0] for messages in CONVERSATIONS[:2]]
    streams = [llm.stream(messages, params) for messages in CONVERSATIONS[:2]]
    texts, ids = ["", ""], [[], []]
    open_streams = [0, 1]
    while open_streams:
        for index in list(open_streams):
            chunk = next(streams[index], None)
            if chunk is None:
                open_streams.remove(index)
                continue
            texts[index] += chunk.text
            ids[index] += chunk.token_ids
            assert chunk.text == "".join(piece.text for piece in chunk.pieces)
    assert texts == [output.text for output in whole]
    assert ids == [output.outputs[0].token_ids for output in whole]


def test_leaving_a_stream_frees_its_rows_and_an_unread_one_takes_none(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
    llm._engine.clear_prefixes()  # rows kept for texts that begin the same
    assert llm.memory()["cache"] == 0
    next(chunk for chunk in stream if chunk.text)
    assert llm.memory()["cache"] > 0
    stream.close()
    llm._engine.clear_prefixes()  # rows kept for texts that begin the same
    assert llm.memory()["cache"] == 0


def test_bad_input_is_named_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt, match="empty"):
        llm.generate("")
    with pytest.raises(InvalidPrompt, match="1024"):
        llm.generate(["fine", "word " * 2000])
    with pytest.raises(InvalidParameter, match="2 sampling_params"):
        llm.generate("a", [SamplingParams(), SamplingParams()])
    assert len(llm.generate("Hello", SamplingParams(max_tokens=1))[0].outputs[0].token_ids) == 1
    llm._engine.clear_prefixes()  # rows kept for texts that begin the same
    assert llm.memory()["cache"] == 0


@pytest.mark.thinned(2)
def test_chat_ends_at_the_end_of_turn_and_bos_is_there_once(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0.0, max_tokens=200))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in (0, 2)
    # This model's BOS also opens each turn: the template's system prompt, the user's turn, the answer. None besides.
    assert output.prompt_token_ids.count(1) == 3
    assert "<|im_end|>" not in output.text


def test_describe_and_banner_say_what_runs(llm: LLM) -> None:
    settings = llm.describe()
    assert settings["speculative"][1]["exit_layer"] == 28
    assert settings["engine"]["threads"] == 1
    assert "same bits" in settings["row_independence"]
    bits = {
        "file": "as the file is quantised (4- to 6-bit blocks with their numbers",
        "none": "not quantised (weights as stored",
    }
    assert bits[settings["engine"]["quantization"]] in llm.banner()


def test_a_cache_that_cannot_fit_is_refused_before_loading() -> None:
    seen: list[str] = []
    with pytest.raises(OutOfMemory, match=r"46\.1 TB for the cache.*cache_tokens"):
        LLM("smollm2-135m", cache_tokens=10**9, progress=lambda what, done, total: seen.append(what))
    assert seen == []


@pytest.fixture(scope="module")
def floats(smollm2_files: LoadedFiles) -> DictWeights:
    """What the file's blocks stand for."""
    return DictWeights({name: smollm2_files.checkpoint.get(name) for name in smollm2_files.checkpoint.shapes})


@pytest.fixture(scope="module")
def wanted_logits(smollm2_files: LoadedFiles, floats: DictWeights) -> torch.Tensor:
    """[tokens, V] of the first conversation, by transformers."""
    config = transformers.AutoConfig.for_model(**smollm2_files.config)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = reference.load_state_dict({name: floats.get(name) for name in floats.shapes}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([smollm2_files.tokenizer.encode_chat(CONVERSATIONS[0])])).logits
    return logits[0]


@pytest.mark.parametrize("quantization", ["none", "torch none"])
def test_logits_are_those_of_transformers(
    smollm2_files: LoadedFiles, floats: DictWeights, wanted_logits: torch.Tensor, quantization: str
) -> None:
    """Within 1e-3 of its fp32 logits; transformers differs from itself by 1.3e-4 between one row and a block."""
    decoder = Decoder(
        DecoderConfig.from_hf(smollm2_files.config),
        floats,
        precision=precision(quantization),
        vocab_size=smollm2_files.tokenizer.vocab_size,
    )
    ids = smollm2_files.tokenizer.encode_chat(CONVERSATIONS[0])
    with torch.inference_mode():
        cache = lanes(decoder, 1, len(ids))
        first = decoder.forward(pack_of((0, 0, ids[:30])), cache).logits
        rest = decoder.forward(pack_of((0, 30, ids[30:])), cache).logits
    assert (torch.cat((first, rest)) - wanted_logits).abs().max() < 1e-3
