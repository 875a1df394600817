"""An EAGLE-3 head that is exact by construction, on a real decoder: every token it drafts is accepted.

The target's only layer that does anything puts the embedding of the token before beside that of the token itself, so
what comes next depends on both. The head's layer reads the newest token's embedding and, from the feature, that of the
token before it. Attention looks at one place only, by turning: the constant in every embedding makes the same query and
key everywhere, whose product is largest at one distance.

    embedding            1 | e(t)    | 0
    state, and feature   1 | e(t)    | e(t before)
    the head puts out    1 | e(next) | e(t)             which is the state of the next position
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.engine.engine import Engine
from outpace.heads import Eagle3Config
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.decoder import Decoder
from outpace.models.eagle3 import Eagle3Head
from outpace.models.mtp import MtpHead
from outpace.models.rope import inverse_frequencies
from tests.engine.fakes import IdVocabulary
from tests.engine.harness import GREEDY, HOT, WARM, Job, run
from tests.models.tiny_models import DictWeights, precision

VOCAB, PART, H = 40, 24, 64
TOKEN, BEFORE = slice(1, 1 + PART), slice(1 + PART, 1 + 2 * PART)
SHARPNESS = 30.0
TARGET = DecoderConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-9,
    }
)
CONFIG = Eagle3Config(replace(TARGET, num_layers=1, windows=(None,)), target_hidden_size=H, draft_vocab_size=VOCAB)
ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
"""The tokens that the head guesses: all of them, in another order than the target's."""


def looking(distance: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key projections [H, width] whose rows look at the row that lies `distance` before."""
    angles = distance * inverse_frequencies(TARGET.rope, H)[0]
    query, key = torch.zeros(H, width), torch.zeros(H, width)
    query[: H // 2, 0] = SHARPNESS
    key[:, 0] = SHARPNESS * torch.cat([angles.cos(), angles.sin()])
    return query, key


def sized(size: float) -> float:
    """What a norm divides a row by that holds 1 and this many embeddings of length PART ** 0.5."""
    return ((1 + size * PART) / H) ** 0.5


def target_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    found = {}
    for name, shape in expected_tensors(TARGET).items():
        found[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
    tokens = torch.randn(VOCAB, PART, generator=generator)
    embedding = found["model.embed_tokens.weight"]
    embedding[:, 0] = 1
    embedding[:, TOKEN] = tokens / tokens.pow(2).mean(1, keepdim=True).sqrt()
    prefix = "model.layers.0.self_attn."
    query, key = looking(1, H)
    found |= {f"{prefix}q_proj.weight": query, f"{prefix}k_proj.weight": key}
    value = found[f"{prefix}v_proj.weight"]
    value[BEFORE, TOKEN] = sized(1) * torch.eye(PART)
    found[f"{prefix}o_proj.weight"] = torch.eye(H)
    found["lm_head.weight"] = torch.randn(VOCAB, H, generator=generator)
    return found


def head_weights() -> dict[str, torch.Tensor]:
    query, key = looking(0, 2 * H)
    eye, value = torch.eye(PART), torch.zeros(H, 2 * H)
    ones, wide = torch.ones(H), torch.zeros(32, H)
    of_feature, of_feature_before = (slice(H + place.start, H + place.stop) for place in (TOKEN, BEFORE))
    value[TOKEN, TOKEN] = sized(1) * eye  # the newest token comes,
    value[TOKEN, of_feature] = -sized(2) * eye  # takes the place of the one before,
    value[BEFORE, of_feature] = sized(2) * eye  # which moves on,
    value[BEFORE, of_feature_before] = -sized(2) * eye  # and what was there goes.
    # The three states are the same, and are told apart by what is taken of each.
    fuse = torch.zeros(H, 3 * H)
    fuse[0, 0] = 1
    fuse[TOKEN, H + 1 : H + 1 + PART] = eye
    fuse[BEFORE, 2 * H + 1 + PART : 2 * H + 1 + 2 * PART] = eye
    return {
        "fc.weight": fuse,
        "norm.weight": ones,
        "lm_head.weight": target_weights()["lm_head.weight"][ORDER],
        **{f"midlayer.{n}.weight": ones for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": key,
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": torch.eye(H),
        "midlayer.mlp.gate_proj.weight": wide,
        "midlayer.mlp.up_proj.weight": wide,
        "midlayer.mlp.down_proj.weight": wide.T.contiguous(),
    }


@pytest.mark.parametrize("words", ["none", "torch none"])
@pytest.mark.parametrize("rows", [512, 20], ids=["one pass", "chunks"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_every_draft_token_is_accepted(k: int, rows: int, words: str) -> None:
    model = Decoder(TARGET, DictWeights(target_weights()), precision=precision(words))
    head = Eagle3Head(model, CONFIG, DictWeights(head_weights()), token_ids=ORDER, precision=precision(words))
    check_all_accepted(model, head, k, rows)


def check_all_accepted(model: Decoder, head: Eagle3Head | MtpHead, k: int, rows: int) -> None:
    """Texts of one batch, greedy and sampled, with k draft tokens a step and at most so many rows in a pass."""
    engine = Engine(
        model,
        model.new_cache(6, 512, 2000),
        {"head": FeatureHeadDrafter("head", head, head.new_cache(6, 512, 2000))},
        vocabulary=IdVocabulary(VOCAB),
        eos_ids=(),
        max_model_len=512,
        num_speculative_tokens={"head": k},
        max_num_batched_tokens=rows,
    )
    prompt = [(5 * at * at + 3) % VOCAB for at in range(33)]
    jobs = [Job(prompt[at:], replace(params, max_tokens=60)) for at, params in enumerate((GREEDY, WARM, HOT))]
    for result in run(engine, jobs):
        assert result.stats.acceptance_rate == 1.0
        assert result.stats.accepted_tokens >= (59 - -(-59 // (k + 1)) if rows == 512 else 20)
        assert len(set(result.outputs[0].token_ids)) > 4
