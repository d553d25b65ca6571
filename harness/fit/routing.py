"""How many experts the tokens of a kernel measurement hit, by the way in which it routed them.

The tables say *balanced* (no collisions) or *power_law_A*: loads of experts are drawn from a bounded power
law of exponent A, and the rank that has most of them is measured (source: the collector of aiconfigurator,
Apache-2.0). The draws of a measurement are not recorded, so the expectation over draws is taken.
"""

from __future__ import annotations

from functools import cache

import numpy as np

DRAWS = 64
LONE_TOKENS = (0.01, 2.0)  # bounds of the law where there are fewer choices than experts
MOST = 0.8  # else from 1 to this share of the tokens


@cache
def hit_and_routed(
    experts: int, per_token: int, tokens: int, ranks: int, routing: str
) -> tuple[float, float]:
    """Distinct experts, and token-expert pairs, on the measured one of `ranks` devices."""
    chosen = tokens * per_token
    if routing == "balanced":
        return max(1.0, min(experts, chosen) / ranks), chosen / ranks
    exponent = 1.0 - float(routing.removeprefix("power_law_"))
    low, high = (1.0, tokens * MOST) if chosen > experts else LONE_TOKENS
    uniform = np.random.default_rng(0).random((DRAWS, experts))
    drawn = ((high**exponent - low**exponent) * uniform + low**exponent) ** (1.0 / exponent)
    loads = np.minimum(np.round(drawn / drawn.sum(1, keepdims=True) * chosen), tokens)
    by_rank = loads.reshape(DRAWS, ranks, experts // ranks)
    busiest = by_rank[np.arange(DRAWS), by_rank.sum(2).argmax(1)]
    return max(1.0, float((busiest > 0).sum(1).mean())), max(1.0, float(busiest.sum(1).mean()))
