"""What a drafter is trained for: drafts that the target keeps.

A token drafted from q is kept with probability alpha = sum_i min(p_i, q_i), p being the target's distribution over
the draft vocabulary (which sums to s, 1 if the vocabulary is the target's). The losses, by row:

    kl   s KL(p / s || q) = sum_i p_i log(p_i / (s q_i))
    tv   s - alpha, which is the total variation distance if s = 1
    lk   lambda kl + (1 - lambda) tv, lambda = exp(-3 alpha) taken as a constant (arXiv 2602.23881)
    nla  -log alpha

Total variation has hardly a gradient while p and q do not overlap; the divergence has, and lk goes from one to the
other as acceptance grows. `head_loss` computes loss and gradient at once, a few rows at a time, because logits of a
whole batch over a large vocabulary do not fit into a small machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["HeadLoss", "Teacher", "head_loss"]

Teacher = Callable[[int, int], "tuple[torch.Tensor, torch.Tensor]"]
"""(first row, row behind the last) -> the target's probabilities [n, D] of the draft vocabulary, and [n] int64 which of
the D the target likes best of all, -1 if that token is not among them."""

_LEAST = 1e-6
"""Acceptance below which -log alpha grows no further, so that its gradient stays finite."""
_CHUNK = 2 << 20
"""Numbers in one chunk of logits: 8 MB, which stays with the process when it is freed (`memory`)."""


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """What a drafter's states are worth.

    Args:
        loss: scalar, sum of weight times loss over the rows; differentiable.
        alpha: [N] probability that a token drawn from the drafter is kept.
        agrees: [N] bool, whether the likeliest token is the target's.
        confidence: [N] the drafter's probability of its likeliest token.
    """

    loss: torch.Tensor
    alpha: torch.Tensor
    agrees: torch.Tensor
    confidence: torch.Tensor


def head_loss(
    kind: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    row_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> HeadLoss:
    """Loss of the rows behind an output head.

    Args:
        kind: kl, tv, lk or nla.
        hidden: [N, H] states after the last norm.
        weight: [D, H] the head's matrix; gets a gradient if it requires one.
        teacher: the target's distribution of these rows.
        row_weights: [N]; None is 1 / N each.
        bias: [D] added to the logits, without a gradient.
    """
    if row_weights is None:
        row_weights = torch.full((len(hidden),), 1 / max(1, len(hidden)), dtype=torch.float32, device="cpu")
    found: tuple[torch.Tensor, ...] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        kind, hidden, weight, teacher, row_weights, bias
    )
    return HeadLoss(*found)


class _HeadLoss(torch.autograd.Function):
    """The gradient is computed with the value, chunk by chunk, and kept: [N, H] and, if wanted, [D, H] numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: Teacher,
        row_weights: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        losses, alphas, agreeing, confidences = [], [], [], []
        step = max(1, _CHUNK // len(weight))
        for begin in range(0, len(hidden), step):
            rows = slice(begin, min(begin + step, len(hidden)))
            p, best = teacher(rows.start, rows.stop)
            part = hidden[rows]
            logits = F.linear(part, weight)
            guess = logits.argmax(-1)  # a token that stands for many is not the likelier for it
            q = (logits if bias is None else logits.add_(bias)).softmax(-1)
            confidence = q.amax(-1)
            loss, alpha, grad = _value_and_gradient(kind, p, q, gradient=needs_hidden or needs_weight)
            losses.append((loss * row_weights[rows]).sum())
            alphas.append(alpha)
            agreeing.append(guess == best)
            confidences.append(confidence)
            if grad is None:
                continue
            grad *= row_weights[rows].unsqueeze(-1)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, part)
        ctx.grads = (grad_hidden, grad_weight)
        results = (_joined(alphas), _joined(agreeing).bool(), _joined(confidences))
        ctx.mark_non_differentiable(*results)
        total = torch.stack(losses).sum() if losses else hidden.new_zeros(())
        return (total, *results)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, *_unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.grads
        grads = (None if grad is None else grad * scale for grad in (hidden, weight))
        return None, *grads, None, None, None


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def _value_and_gradient(
    kind: str, p: torch.Tensor, q: torch.Tensor, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[n] losses, [n] acceptance, [n, D] gradient by the logits z (written over q), by hand:

    d kl / d z_j = s q_j - p_j        d alpha / d z_j = q_j ([q_j < p_j] - sum_i q_i [q_i < p_i])
    """
    s, alpha = p.sum(-1), torch.minimum(p, q).sum(-1)
    towards_kl, towards_alpha, loss = _mix(kind, p, q, s, alpha)
    if not gradient:
        return loss, alpha, None
    grown = None
    if towards_alpha is not None:
        grown = torch.where(q < p, q, 0)  # where more of q is still kept
        grown.addcmul_(q, grown.sum(-1, keepdim=True), value=-1).mul_(-towards_alpha.unsqueeze(-1))
    if towards_kl is None:
        return loss, alpha, grown
    q.mul_((s * towards_kl).unsqueeze(-1)).addcmul_(p, towards_kl.unsqueeze(-1), value=-1)
    return loss, alpha, q if grown is None else q.add_(grown)


def _mix(
    kind: str, p: torch.Tensor, q: torch.Tensor, s: torch.Tensor, alpha: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """([n] or None) how much of the divergence and of alpha is in the loss's gradient, and [n] the loss."""
    if kind == "nla":
        kept = alpha.clamp_min(_LEAST)
        return None, torch.where(alpha > _LEAST, 1 / kept, 0), -kept.log()
    if kind == "tv":
        return None, torch.ones_like(alpha), s - alpha
    floor = torch.finfo(q.dtype).tiny
    kl = (torch.xlogy(p, p) - p * q.clamp_min(floor).log()).sum(-1) - torch.xlogy(s, s)
    if kind == "kl":
        return torch.ones_like(alpha), None, kl
    blend = torch.exp(-3 * alpha)
    return blend, 1 - blend, blend * kl + (1 - blend) * (s - alpha)
