"""The default planner with true lengths: the reference for what prediction costs. Simulated runs only.

It plans by the same rules and the same model as `flow`; only what it is told differs: the lengths of the
sequences that are under way, rather than those of batches that have ended.
"""

from __future__ import annotations

from systems.policies.planners.flow import Flow


class Clairvoyant(Flow):
    """`flow`, told the truth about lengths."""

    name = "clairvoyant"
    knows_lengths = True
