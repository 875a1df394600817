"""A tiny target on disk: bytes for tokens, a chat template, and layers of which the last ones only nudge the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outpace.config import EngineConfig
from outpace.models.decoder import Decoder
from outpace.source import Source
from outpace.train.data.packing import Windows
from outpace.train.identity import Identity
from outpace.train.kinds.base import Material
from outpace.train.target import Batch, Target
from tests.models.tiny_tokenizers import byte_level

LAYERS, EXIT, WIDE, HEADS, KEYS, DIM = 4, 2, 64, 4, 2, 12
HIDDEN = HEADS * DIM
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ENGINE: dict[str, Any] = {"threads": 1, "quantization": "none", "max_model_len": 1024}


def tensors(vocab: int, seed: int = 3, dim: int = DIM) -> dict[str, torch.Tensor]:
    """Random weights of a llama whose attention heads have `dim` values each."""
    hidden = HEADS * dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    found = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden, scale=0.8)}
    for layer in range(LAYERS):
        nudge = 0.25 if layer < EXIT else 0.08
        prefix = f"model.layers.{layer}."
        found[f"{prefix}self_attn.q_proj.weight"] = random(HEADS * dim, hidden)
        found[f"{prefix}self_attn.k_proj.weight"] = random(KEYS * dim, hidden)
        found[f"{prefix}self_attn.v_proj.weight"] = random(KEYS * dim, hidden)
        found[f"{prefix}self_attn.o_proj.weight"] = random(hidden, HEADS * dim, scale=nudge)
        found[f"{prefix}mlp.gate_proj.weight"] = random(WIDE, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = random(WIDE, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = random(hidden, WIDE, scale=nudge)
        found[f"{prefix}input_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        found[f"{prefix}post_attention_layernorm.weight"] = 1 + random(hidden, scale=0.1)
    found["model.norm.weight"] = 1 + random(hidden, scale=0.1)
    return found


def save_target(folder: Path, *, template: str | None = TEMPLATE, seed: int = 3, dim: int = DIM) -> Path:
    """Writes the model's folder; `dim` is the size of an attention head."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * dim,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(vocab, seed, dim), folder / "model.safetensors")
    return folder


class World:
    """A tiny target, opened.

    Args:
        folder: of the model.
        quantization: of its layers.
        loss: that drafters are trained for.
        chain: draft length that is reported.
    """

    def __init__(self, folder: Path, quantization: str = "none", *, loss: str = "lk", chain: int = 4) -> None:
        self.engine = EngineConfig(str(folder), **{**ENGINE, "quantization": quantization})
        source = Source.open(str(folder), self.engine, lambda _: None)
        assert source.shape is not None
        self.files, self.shape = source.files, source.shape
        self.identity = Identity.of(self.files, self.shape)
        model = source.load(self.engine, None, lambda *_: None)
        assert isinstance(model, Decoder)
        self.model = model
        self.material = Material(self.files, self.shape, self.files.tokenizer.vocab_size, loss, chain, str(folder))

    def target(self, *aux_layers: int) -> Target:
        return Target(self.model, aux_layers)

    def batch(self, windows: Windows, *aux_layers: int) -> Batch:
        target = self.target(*aux_layers)
        return Batch(windows, target.states(windows, torch.arange(len(windows))), target)


def random_windows(count: int, width: int, vocab: int, seed: int = 0) -> Windows:
    """Windows of random tokens in two or three pieces, all of which count, the last slots being filling."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (count, width), generator=generator)
    pieces = torch.zeros(count, width, dtype=torch.int64)
    for row in range(count):
        for cut in sorted(torch.randint(4, width - 4, (2,), generator=generator).tolist()):
            pieces[row, cut:] += 1
    pieces[0, -3:] = -1
    return Windows(ids, pieces, pieces >= 0)
