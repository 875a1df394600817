"""Which exit the probe chooses on a model whose answer is known."""

from __future__ import annotations

import pytest

from outpace.drafters.exit_probe import _estimate, probe_exits
from tests.end_to_end.tiny import EXIT_LAYER, LAYERS, VOCAB, target


def test_it_measures_agreement_and_gives_the_lane_back() -> None:
    model = target("none")
    cache = model.new_cache(1, 200, 200)
    ids = [i * 11 % VOCAB for i in range(96)]
    best = probe_exits(model, cache, ids, most_tokens=4)
    # Layers from EXIT_LAYER on only nudge the stream, those before make it: leaving earlier cannot agree as often.
    assert EXIT_LAYER <= best.exit_layer < LAYERS
    assert 0.3 < best.agreement <= 1.0
    assert 1 <= best.num_speculative_tokens <= 4
    assert cache.free_rows == 200
    cache.check_integrity()


def test_time_runs_out_after_the_likeliest_exit() -> None:
    model = target("none")
    best = probe_exits(model, model.new_cache(1, 200, 200), list(range(64)), most_tokens=2, seconds=0.0)
    assert best.exit_layer == LAYERS - 1


def test_the_prediction_follows_its_formula() -> None:
    """Half the depth, no head, always right, rows beyond the first free: k + 1 tokens for k / 2 + 1."""
    best = _estimate(2, 1.0, 0.5, 0.0, [1.0, 1.0, 1.0, 1.0])
    assert (best.num_speculative_tokens, best.speedup) == (3, pytest.approx(4 / 2.5))
    # Never right: one token for the cost of drafting and verifying, so the shortest draft loses least.
    worst = _estimate(2, 0.0, 0.5, 0.0, [1.0, 1.2, 1.4])
    assert worst.num_speculative_tokens == 1
    assert worst.speedup == pytest.approx(1 / (0.5 + 1.2 - 0.5 * 0.2))
