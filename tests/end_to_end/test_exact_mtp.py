"""An MTP layer that is exact by construction, on a real decoder: every token it drafts is accepted.

The target is that of `test_exact_head`: its state is 1 | e(t) | e(t before), which says what comes next. The MTP layer
needs no attention for the next state: the newest token's embedding comes in, that of the token before is in the state
it reads, and what it puts out is read again for the token after. Another order of the two, or a token of another
place, is another text.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.engine.engine import Engine
from outpace.models.decoder import Decoder
from outpace.models.mtp import MtpHead
from outpace.models.mtp_config import layer_tensors, mtp_layer
from tests.engine.fakes import IdVocabulary
from tests.engine.harness import GREEDY, HOT, WARM, Job, run
from tests.models.tiny_models import DictWeights, precision

from .test_exact_head import BEFORE, PART, TARGET, TOKEN, VOCAB, H, sized, target_weights


def mtp_weights() -> dict[str, torch.Tensor]:
    found = {}
    for name, shape in layer_tensors(TARGET).items():
        found[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
    enter, eye = found["input_proj.weight"], torch.eye(PART)
    of_embedding = slice(H + TOKEN.start, H + TOKEN.stop)
    enter[0, 0] = sized(2)
    enter[BEFORE, TOKEN] = sized(2) * eye
    enter[TOKEN, of_embedding] = sized(1) * eye
    return found


@pytest.mark.parametrize(("k", "words"), [(1, "none"), (4, "none"), (8, "none"), (4, "torch none")])
@pytest.mark.parametrize("rows", [512, 20], ids=["one pass", "chunks"])
def test_every_draft_token_is_accepted(k: int, rows: int, words: str) -> None:
    model = Decoder(TARGET, DictWeights(target_weights()), precision=precision(words))
    head = MtpHead(model, mtp_layer(TARGET), DictWeights(mtp_weights()))
    engine = Engine(
        model,
        model.new_cache(6, 512, 2000),
        {"mtp": FeatureHeadDrafter("mtp", head, head.new_cache(6, 512, 2000))},
        vocabulary=IdVocabulary(VOCAB),
        eos_ids=(),
        max_model_len=512,
        num_speculative_tokens={"mtp": k},
        max_num_batched_tokens=rows,
    )
    prompt = [(5 * at * at + 3) % VOCAB for at in range(33)]
    jobs = [Job(prompt[at:], replace(params, max_tokens=60)) for at, params in enumerate((GREEDY, WARM, HOT))]
    for result in run(engine, jobs):
        assert result.stats.acceptance_rate == 1.0
        assert result.stats.accepted_tokens >= (59 - -(-59 // (k + 1)) if rows == 512 else 20)
        assert len(set(result.outputs[0].token_ids)) > 4
