"""Losses by hand, and the chunked gradient against autograd on the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from outpace.train import losses
from outpace.train.losses import head_loss
from outpace.train.settings import LOSSES

P = torch.tensor([[0.5, 0.25, 0.25]])
Q = torch.tensor([[0.25, 0.5, 0.25]])
BY_HAND = {
    "kl": 0.25 * math.log(2),  # 1/2 log 2 - 1/4 log 2
    "tv": 0.25,
    "nla": -math.log(0.75),  # alpha = 1/4 + 1/4 + 1/4
    "lk": math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
}


def row_losses(kind: str, p: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas, for autograd.

    Args:
        kind: kl, tv, lk or nla.
        p: [N, D] the target's probabilities of the draft vocabulary.
        logits: [N, D] the drafter's.

    Returns:
        [N] losses, [N] acceptance alpha.
    """
    log_q = logits.log_softmax(-1)
    q, s = log_q.exp(), p.sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "nla":
        return -alpha.clamp_min(losses._LEAST).log(), alpha.detach()
    kl = (torch.xlogy(p, p / s.unsqueeze(-1)) - p * log_q).sum(-1)
    tv = s - alpha
    if kind == "kl":
        return kl, alpha.detach()
    if kind == "tv":
        return tv, alpha.detach()
    blend = torch.exp(-3 * alpha.detach())
    return blend * kl + (1 - blend) * tv, alpha.detach()


@pytest.mark.parametrize("kind", LOSSES)
def test_three_tokens_by_hand(kind: str) -> None:
    loss, alpha = row_losses(kind, P, Q.log())
    assert loss.tolist() == pytest.approx([BY_HAND[kind]])
    assert alpha.tolist() == pytest.approx([0.75])


@pytest.mark.parametrize("kind", LOSSES)
def test_a_draft_vocabulary_that_lacks_half_of_the_mass_by_hand(kind: str) -> None:
    p = torch.tensor([[0.25, 0.25]])
    loss, alpha = row_losses(kind, p, torch.tensor([[0.75, 0.25]]).log())
    assert alpha.tolist() == pytest.approx([0.5])  # min(1/4, 3/4) + min(1/4, 1/4)
    kl = 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    expected = {"kl": kl, "tv": 0.0, "nla": math.log(2), "lk": math.exp(-1.5) * kl}
    assert loss.tolist() == pytest.approx([expected[kind]], abs=1e-7)


@pytest.mark.parametrize("kind", LOSSES)
def test_no_loss_where_both_agree(kind: str) -> None:
    loss, alpha = row_losses(kind, P, P.log())
    assert loss.tolist() == pytest.approx([0.0], abs=1e-6)
    assert alpha.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("chunk", [1 << 20, 24])  # all rows at once, and two at a time
@pytest.mark.parametrize("kind", LOSSES)
def test_values_and_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int, subset: bool
) -> None:
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 4, generator=generator, requires_grad=True)
    weight = torch.randn(12, 4, generator=generator, requires_grad=True)
    p = torch.randn(7, 12, generator=generator).mul(2).softmax(-1)
    p = p * torch.rand(7, 1, generator=generator) if subset else p
    weights = torch.rand(7, generator=generator)
    best = p.argmax(-1)

    expected, alpha = row_losses(kind, p, hidden @ weight.T)
    (3 * (expected * weights).sum()).backward()
    wanted = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    found = head_loss(kind, hidden, weight, lambda begin, end: (p[begin:end], best[begin:end]), weights)
    (3 * found.loss).backward()

    assert found.loss.item() == pytest.approx((expected * weights).sum().item(), rel=1e-5)
    torch.testing.assert_close(found.alpha, alpha)
    assert found.agrees.tolist() == ((hidden @ weight.T).argmax(-1) == best).tolist()
    for tensor, grad in zip((hidden, weight), wanted, strict=True):
        assert grad is not None
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_no_rows_are_no_loss() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    p = torch.full((3, 5), 0.2)
    head_loss("kl", hidden, weight, lambda a, b: (p[a:b], torch.zeros(b - a, dtype=torch.int64))).loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None
    nothing = head_loss("kl", hidden[:0], weight, lambda a, b: (p[a:b], p[a:b].argmax(-1)))
    assert nothing.loss.item() == 0
    assert len(nothing.alpha) == 0


def test_rows_weigh_alike_unless_told_otherwise() -> None:
    hidden, weight = torch.eye(3, 4), torch.randn(5, 4)
    p = torch.full((3, 5), 0.2)

    def teacher(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        return p[a:b], torch.zeros(b - a, dtype=torch.int64)

    mean = head_loss("kl", hidden, weight, teacher).loss
    rows, _ = row_losses("kl", p, hidden @ weight.T)
    assert mean.item() == pytest.approx(rows.mean().item(), rel=1e-5)
    alone = head_loss("kl", hidden, weight, teacher, torch.tensor([0.0, 1.0, 0.0])).loss
    assert alone.item() == pytest.approx(rows[1].item(), rel=1e-5)


def test_acceptance_of_disjoint_distributions_stays_finite() -> None:
    """-log alpha has no gradient where nothing overlaps, and no infinity either."""
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    p = torch.tensor([[0.0, 1.0]])
    found = head_loss("nla", hidden, weight, lambda a, b: (p[a:b], torch.tensor([1])))
    found.loss.backward()
    assert math.isfinite(found.loss.item())
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
