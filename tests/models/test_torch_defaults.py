"""A caller's torch.set_default_dtype and torch.set_default_device change nothing, whenever they are set."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.models.adapter import ADAPTER_TYPE, adapter_tensors
from outpace.models.config import DecoderConfig
from tests.server.tiny_folder import save_tiny_model

pytestmark = pytest.mark.slow

EXIT_LAYER = 2
DEFAULTS: dict[str, tuple[torch.dtype, str | None]] = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float64": (torch.float64, None),
    "meta": (torch.float32, "meta"),
}
PRECISIONS = (("native", "none"), ("native", "int8"), ("native", "int4"), ("torch", "none"), ("torch", "int8"))
PROMPTS = ["to be or not to be, to be or not ", "abcabcabcabc", "x" * 350 + "y" * 350, "a b a b"]
"""The third is long: torch's kernels compute it in pieces."""
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, logprobs=1, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, top_k=8, seed=7, max_tokens=16, logits_processors=[lambda ids, logits: logits * 2]),
    SamplingParams(temperature=1.0, seed=3, max_tokens=16, allowed_token_ids=[70, 71]),  # repeats itself
)
METHODS = (None, "ngram", "draft_model", "early_exit")


@contextlib.contextmanager
def torch_defaults(name: str) -> Iterator[None]:
    """These defaults of torch, and then the usual ones again."""
    dtype, device = DEFAULTS[name]
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model that is often right, and an adapter, on disk under "target", "draft" and "adapter"."""
    root = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        save_tiny_model(root / name)
    tensors = load_file(root / "target" / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) >= EXIT_LAYER:
            tensor *= 0.1  # so that leaving early is often right too
    save_file(tensors, root / "target" / "model.safetensors", {"format": "pt"})
    generator = torch.Generator().manual_seed(2)
    noisy = {n: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    save_file(noisy, root / "draft" / "model.safetensors", {"format": "pt"})
    _save_adapter(root, tensors)
    return root


def _save_adapter(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The target's own layer behind the exit, as an adapter."""
    config = DecoderConfig.from_hf(json.loads((root / "target" / "config.json").read_text()))
    (root / "adapter").mkdir()
    block = f"model.layers.{EXIT_LAYER}."
    own = {
        name: tensors[name.replace("block.", block) if name.startswith("block.") else f"model.{name}"]
        for name in adapter_tensors(config)
    }
    save_file(own, root / "adapter" / "model.safetensors")
    sizes = {"hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers}
    settings = {"model_type": ADAPTER_TYPE, "exit_layer": EXIT_LAYER, **sizes}
    (root / "adapter" / "config.json").write_text(json.dumps(settings))


def build(folder: Path, kernels: str, quantization: str) -> LLM:
    """All three drafters, each verified by another rule."""
    speculative = [
        {"method": "ngram", "prompt_lookup_min": 1, "rejection_sample_method": "block"},
        {"method": "draft_model", "model": str(folder / "draft"), "rejection_sample_method": "standard"},
        {"method": "early_exit", "adapter": str(folder / "adapter")},
    ]
    options: dict[str, Any] = {"kernels": kernels, "quantization": quantization, "threads": 1}
    options["speculative_control"] = "fixed"  # text that follows a law depends on what is drafted
    return LLM(folder / "target", speculative, max_model_len=1024, max_num_batched_tokens=1024, **options)


def outcome(llm: LLM) -> list[Any]:
    """Token ids and log probabilities of every prompt with every method, and what speculation did."""
    found: list[Any] = []
    for method in METHODS:
        speculation = SpeculationParams(enabled=method is not None, method=method)
        for output in llm.generate(PROMPTS, PARAMS, speculation):
            (choice,) = output.outputs
            found += [choice.token_ids, choice.logprobs, output.prompt_logprobs]
            found.append((output.stats.draft_tokens, output.stats.accepted_tokens))
    return found


@functools.cache
def usual(folder: Path, kernels: str, quantization: str) -> tuple[LLM, list[Any]]:
    """A model built with torch's usual defaults, and what comes of it."""
    llm = build(folder, kernels, quantization)
    return llm, outcome(llm)


def test_the_cases_draft_and_accept(folder: Path) -> None:
    books = [item for item in usual(folder, "native", "none")[1] if isinstance(item, tuple)]
    for begin, method in zip(range(0, len(books), len(PROMPTS)), METHODS, strict=True):
        drafted, accepted = (sum(column) for column in zip(*books[begin : begin + len(PROMPTS)], strict=True))
        assert (drafted > 0) == (method is not None)
        assert (accepted > 0) == (method is not None)


@pytest.mark.parametrize(("kernels", "quantization"), PRECISIONS)
@pytest.mark.parametrize("default", DEFAULTS)
def test_set_after_building(folder: Path, default: str, kernels: str, quantization: str) -> None:
    llm, expected = usual(folder, kernels, quantization)
    with torch_defaults(default):
        found = outcome(llm)
    assert found == expected


@pytest.mark.parametrize(("kernels", "quantization"), PRECISIONS)
@pytest.mark.parametrize("default", DEFAULTS)
def test_set_before_building(folder: Path, default: str, kernels: str, quantization: str) -> None:
    _, expected = usual(folder, kernels, quantization)
    with torch_defaults(default):
        llm = build(folder, kernels, quantization)
        found = outcome(llm)
    assert found == expected
    assert outcome(llm) == expected, "back to the usual defaults"


@pytest.mark.parametrize("default", DEFAULTS)
def test_an_exit_that_is_probed_for(folder: Path, default: str) -> None:
    """Which layer it is depends on the time; the text does not."""
    _, expected = usual(folder, "native", "none")
    with torch_defaults(default):
        llm = LLM(folder / "target", "self", kernels="native", quantization="none", threads=1, max_model_len=1024)
        (output,) = llm.generate(PROMPTS[0], PARAMS[0])
    assert output.outputs[0].token_ids == expected[0]


FRESH = """
import sys, torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
from outpace import LLM, SamplingParams
llm = LLM(sys.argv[1], "ngram", kernels=sys.argv[2], quantization=sys.argv[3], threads=1, max_model_len=1024)
print(llm.generate(sys.argv[4], SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize(("kernels", "quantization"), [("native", "none"), ("torch", "none"), ("torch", "int8")])
def test_set_before_the_import(folder: Path, kernels: str, quantization: str) -> None:
    """In a process of its own: nothing has been looked up or kept yet."""
    _, expected = usual(folder, kernels, quantization)
    arguments = [str(folder / "target"), kernels, quantization, PROMPTS[0]]
    done = subprocess.run([sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected[0]
