"""An MTP layer that is exact by construction, on a real decoder: every token it drafts is accepted.

The target is that of `test_exact_head`: its state is 1 | e(t) | e(t before), which says what comes next. The MTP layer
needs no attention for the next state: the newest token's embedding comes in, that of the token before is in the state
it reads, and what it puts out is read again for the token after. Another order of the two, or a token of another
place, is another text.
"""

from __future__ import annotations

import pytest
import torch

from outpace.models.decoder import Decoder
from outpace.models.mtp import MtpHead
from outpace.models.mtp_config import layer_tensors, mtp_layer
from tests.models.tiny_models import DictWeights, precision

from .test_exact_head import BEFORE, PART, TARGET, TOKEN, H, check_all_accepted, sized, target_weights


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
    check_all_accepted(model, head, k, rows)
