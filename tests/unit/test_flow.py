"""The default planner under views that a run may never show: legal, and without a regime to fall into."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.runs.assemble import Parts, assemble
from systems.policies.layouts import Split, count, place_blocks
from systems.policies.pivot import Blocks, Pivot, rearrange
from systems.policies.planners.flow import Flow, Regret, _gain
from systems.policies.planners.forecast import forecast
from systems.policies.planners.model import Cluster, Outstanding
from systems.types import NS_PER_S, Coming, LeaseState, ReplicaView, Role, Training, View
from tests.conftest import small_spec

GROUPS = ("dense-9b", "moe-30b", "moe-30b-32b", "moe-122b")


@cache
def parts_of(group: str) -> Parts:
    return assemble(small_spec("pivot", group, steps=20, gpus=None, settings=()))


def view_of(
    group: str, roles: tuple[Role, ...], coming: tuple[Coming, ...], now_s: float = 1000.0,
    version: int = 5, training_since_s: float | None = None, ready: bool = False,
) -> View:  # fmt: skip
    """A picture of a cluster whose blocks have these roles, and which has this much to do."""
    parts = parts_of(group)
    rolling, judging = sum(c.rolling for c in coming), sum(c.judging for c in coming)
    work = {Role.ROLLOUT: rolling, Role.REWARD: judging}
    placements = place_blocks(parts.layout, roles)
    replicas = []
    for epoch, placement in enumerate(placements):
        same = sum(other.role is placement.role for other in placements)
        running = 0 if placement.role is Role.TRAIN else min(256, work[placement.role] // same)
        replicas.append(ReplicaView(epoch, placement, LeaseState.ACTIVE, running, running * 2000, version))
    running_by = {role: sum(r.running for r in replicas if r.role is role) for role in work}
    return View(
        now_ns=round(now_s * NS_PER_S),
        layout=parts.layout,
        recipe=replace(parts.recipe, staleness=max(0, len(coming) - 1)),
        replicas=tuple(replicas),
        down=(),
        shifting=(),
        waiting={role: work[role] - running_by[role] for role in work},
        running=running_by,
        coming=coming,
        training=Training(
            version=version,
            started_ns=None if training_since_s is None else round((now_s - training_since_s) * NS_PER_S),
            batch_ready=ready,
        ),
        estimates=parts.prior,
    )


@st.composite
def views(draw: st.DrawFn) -> View:
    group = draw(st.sampled_from(GROUPS))
    layout = parts_of(group).layout
    blocks, least = len(layout.devices) // layout.block, -(-layout.train_min // layout.block)
    unit = draw(st.sampled_from([0, *range(least, blocks + 1)]))
    rollouts = draw(st.integers(0, blocks - unit))
    roles = (Role.TRAIN,) * unit + (Role.ROLLOUT,) * rollouts + (Role.REWARD,) * (blocks - unit - rollouts)
    coming = []
    for _ in range(draw(st.integers(1, 3))):
        rolling = draw(st.integers(0, 2048))
        judging = draw(st.integers(0, 2048 - rolling))
        since = draw(st.none() | st.integers(0, 1000 * NS_PER_S))
        coming.append(Coming(rolling, judging, 2048 - rolling - judging, since, since))
    ready = coming[0].scored == 2048 or draw(st.booleans())
    since_s = draw(st.none() | st.floats(0, 900)) if unit else None
    return view_of(group, roles, tuple(coming), training_since_s=since_s, ready=ready)


def split_of(view: View) -> Split:
    return count(
        role
        for device in view.layout.devices[:: view.layout.block]
        for role in (next((r.role for r in view.replicas if device.id in r.placement.devices), Role.ROLLOUT),)
    )


@given(views())
@settings(max_examples=150, deadline=None)
def test_every_choice_is_legal(view: View) -> None:
    now = split_of(view)
    split, why, _ = Flow().choose(view, now, Regret())
    blocks = len(view.layout.devices) // view.layout.block
    assert sum(split) == blocks
    assert min(split) >= 0
    assert why
    assert split.train == 0 or split.train * view.layout.block >= view.layout.train_min
    if view.training.started_ns is not None:
        assert split.train == now.train, "a step that runs keeps its unit"
    elif view.training.batch_ready:
        assert split.train > 0, "a batch that is ready gets a unit"
    else:
        assert split.train == 0, "without a batch nobody holds devices for training"
    for role, outstanding in (
        (Role.ROLLOUT, view.outstanding(Role.ROLLOUT)),
        (Role.REWARD, view.outstanding(Role.REWARD)),
    ):
        if outstanding and blocks - split.train >= 2:
            assert split.of(role) > 0, "a role with work has devices"


@given(views())
@settings(max_examples=100, deadline=None)
def test_it_leaves_any_split_in_bounded_time_when_another_is_clearly_better(view: View) -> None:
    """The picture stays as it is and only time goes on: regret must pay for the move. This is what the
    first planner lacked, whose small training unit absorbed it for good."""
    planner, now, memory = Flow(), split_of(view), Regret(seen_ns=view.now_ns)
    cluster = Cluster(view)
    rollouts, judgements = view.outstanding(Role.ROLLOUT), view.outstanding(Role.REWARD)
    split, why, memory = planner.choose(view, now, memory)
    if split.train != now.train:
        return  # it has left at once
    best = Split(*planner.serve(cluster, rollouts, judgements, cluster.blocks - now.train), now.train)
    gain = _gain(cluster, rollouts, judgements, now, best)
    have = cluster.rollout.value(now.rollout, rollouts) + cluster.reward.value(now.reward, judgements)
    if gain.gap < 0.05 * have or gain.gap <= 0:
        return  # nothing is clearly better
    bound_s = gain.price / gain.gap + 3 * planner.tick_s
    at_s = 0.0
    while split == now:
        assert at_s <= bound_s, f"{now} kept for {at_s:.0f} s, {best} has {gain.gap:.1f} more: {why}"
        at_s += planner.tick_s
        later = replace(view, now_ns=view.now_ns + round(at_s * NS_PER_S))
        split, why, memory = planner.choose(later, now, memory)


@given(views())
@settings(max_examples=60, deadline=None)
def test_it_does_not_go_back_and_forth(view: View) -> None:
    """Where it has just gone, it stays while nothing changes."""
    planner, now = Flow(), split_of(view)
    split, _, memory = planner.choose(view, now, Regret(seen_ns=view.now_ns))
    if split.train != now.train:
        return  # the picture would have another unit by then
    for _ in range(40):
        view = replace(view, now_ns=view.now_ns + 15 * NS_PER_S)
        following, _, memory = planner.choose(view, split, memory)
        if following != split and following.train == split.train:
            cluster = Cluster(view)
            gap = _gain(
                cluster, view.outstanding(Role.ROLLOUT), view.outstanding(Role.REWARD), split, following
            )
            assert gap.gap > 0, "a move that is not useful"
        split = following


@given(st.sampled_from(GROUPS), st.integers(2, 128), st.integers(0, 6000), st.integers(0, 6000))
@settings(deadline=None)
def test_serving_gets_the_split_of_most_value(
    group: str, blocks: int, rollouts: float, judgements: float
) -> None:
    view = view_of(
        group,
        (Role.ROLLOUT,) * (len(parts_of(group).layout.devices) // parts_of(group).layout.block),
        (Coming(0, 0, 0),),
    )
    cluster = Cluster(view)
    rollouts, judgements = float(round(rollouts)), float(round(judgements))
    rollout, reward = Flow().serve(cluster, rollouts, judgements, blocks)
    assert rollout + reward == blocks
    if rollouts and judgements:

        def value(r: int) -> float:
            return cluster.rollout.value(r, rollouts) + cluster.reward.value(blocks - r, judgements)

        assert value(rollout) >= max(value(r) for r in range(1, blocks)) * (1 - 1e-6) - 1e-6


@given(views())
@settings(max_examples=60, deadline=None)
def test_a_forecast_publishes_and_never_takes_less_work_than_there_is(view: View) -> None:
    cluster, now = Cluster(view), split_of(view)
    found = forecast(cluster, Outstanding(view, cluster), now, now, 2, Flow())
    assert found.publishes == 2
    assert 0 < found.time_s < 1e7
    assert found.value <= found.time_s * cluster.devices * 1.05


def test_a_unit_is_parked_while_no_batch_is_ready_and_back_when_one_is() -> None:
    roles = parts_of("moe-30b").layout
    blocks = len(roles.devices) // roles.block
    serving = (Role.TRAIN,) * 2 + (Role.ROLLOUT,) * 2 + (Role.REWARD,) * (blocks - 4)
    busy = view_of("moe-30b", serving, (Coming(500, 500, 1048),) * 2)
    split, _, _ = Flow().choose(busy, split_of(busy), Regret())
    assert split.train == 0
    ready = view_of("moe-30b", serving, (Coming(0, 0, 2048), Coming(500, 500, 1048)), ready=True)
    split, _, _ = Flow().choose(ready, split_of(ready), Regret())
    assert split.train * roles.block >= roles.train_min


def test_pivot_changes_as_few_blocks_as_the_split_asks_for_and_the_idle_ones_first() -> None:
    roles = (Role.ROLLOUT,) * 3 + (Role.REWARD,) * 5
    view = view_of("moe-30b", roles, (Coming(600, 600, 848),))
    replicas = [replace(r, running=0) if 12 in r.placement.devices else r for r in view.replicas]
    after = rearrange(replace(view, replicas=tuple(replicas)), roles, Split(4, 4, 0))
    assert sum(a is not b for a, b in zip(roles, after, strict=True)) == 1
    assert after[3] is Role.ROLLOUT, "the block of device 12 had nothing to do"


@pytest.mark.parametrize("urgent", [True, False])
def test_pivot_rests_after_a_change_unless_a_batch_waits(urgent: bool) -> None:
    policy = Pivot()
    roles = (Role.ROLLOUT,) * 7 + (Role.REWARD,)
    view = view_of("moe-30b", roles, (Coming(10, 2000, 38), Coming(0, 0, 2048)), ready=urgent)
    memory = Blocks(roles, Regret(seen_ns=view.now_ns), changed_ns=view.now_ns - 1)
    plan, _ = policy.plan(view, memory)
    assert (plan.why == "cooldown") is not urgent
    assert plan.revisit_ns is not None
    assert plan.revisit_ns > view.now_ns
