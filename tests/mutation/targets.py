"""What is mutated, which tests must notice, and what is left out and why."""

from __future__ import annotations

SEED = 20261201  # of the draw
DRAWN = 500
LIMIT_S = 300.0  # of all tests of one mutant: several times what the slowest list takes

# Tests run in this order until one fails: those written for a module first, whole runs last.
FAULTS = "tests/sim/test_faults.py::"
RUNS = (
    "tests/sim/test_golden.py", "tests/sim/test_runtime.py",
    f"{FAULTS}test_a_run_survives_what_goes_wrong[0]", f"{FAULTS}test_a_lost_training_unit_repeats_the_step",
    f"{FAULTS}test_a_lost_replica_keeps_what_was_streamed",
)  # fmt: skip
DECIDES = ("tests/sim/test_golden.py",)
SERVING = ("tests/unit/test_serving.py", *RUNS)
STUDIES = ("tests/unit/test_stats.py", "tests/unit/test_compare.py")
SWEEPS = "tests/cli/test_sweep.py::"
STUDY = f"{SWEEPS}test_a_study_from_its_suite_to_its_claims"
TARGETS: dict[str, tuple[str, ...]] = {
    "systems/pipeline.py": (*RUNS, "tests/live/test_cut_off.py"),
    "systems/runtime.py": SERVING,
    "systems/serving.py": SERVING,
    "systems/leases.py": SERVING,
    "systems/turn.py": SERVING,
    "systems/estimates/estimator.py": ("tests/unit/test_estimates.py", *RUNS),
    "systems/estimates/lengths.py": ("tests/unit/test_estimates.py",),
    "systems/events.py": ("tests/unit/test_events.py",),
    "systems/scheduler.py": ("tests/unit/test_scheduler.py", *RUNS),
    "systems/reconcile.py": ("tests/unit/test_reconcile.py", *RUNS),
    "systems/lifecycle.py": ("tests/unit/test_lifecycle.py", *SERVING),
    "systems/staleness.py": ("tests/unit/test_staleness.py", *RUNS),
    "systems/batching.py": ("tests/unit/test_batching.py", *RUNS),
    "systems/rewards.py": ("tests/unit/test_rewards.py", "tests/unit/test_hops.py"),
    "systems/policies/layouts.py": ("tests/unit/test_reconcile.py", *DECIDES),
    "systems/policies/pivot.py": DECIDES,
    "systems/policies/planners/flow.py": ("tests/unit/test_flow.py", *DECIDES),
    "systems/policies/planners/forecast.py": ("tests/unit/test_flow.py", *DECIDES),
    "systems/policies/planners/model.py": ("tests/unit/test_flow.py", *DECIDES),
    "systems/policies/colocated.py": DECIDES,
    "systems/policies/disaggregated.py": DECIDES,
    "harness/studies/stats.py": STUDIES,
    "harness/results/comparable.py": ("tests/unit/test_compare.py", "tests/figures/test_figures.py"),
    "harness/studies/compare.py": ("tests/unit/test_compare.py", STUDY),
    "harness/studies/claims.py": ("tests/unit/test_compare.py", STUDY),
    "harness/results/summary.py": ("tests/unit/test_tally.py", "tests/figures/test_figures.py"),
    "harness/studies/sweep.py": (
        "tests/unit/test_ledger.py", f"{SWEEPS}test_cells_are_kept_only_if_that_was_asked_for",
        f"{SWEEPS}test_what_fails_stops_nothing_else_and_is_tried_again_on_request",
        f"{SWEEPS}test_a_cell_that_dies_before_its_run_begins_is_on_record",
        f"{SWEEPS}test_fail_fast_starts_nothing_more",
    ),
    "harness/results/record.py": (
        "tests/unit/test_log.py", "tests/cli/test_cli.py::test_a_run_leaves_a_complete_directory",
        "tests/cli/test_endings.py::test_a_run_that_was_killed_is_not_running",
    ),
    "harness/runs/code.py": ("tests/unit/test_log.py",),
    "harness/results/log.py": ("tests/unit/test_log.py",),
}  # fmt: skip

# Places where a mutant cannot change what the program does, so that no test could notice.
EXCLUDED = {
    "annotation": "annotations are not evaluated (`from __future__ import annotations`)",
    "dataclass option": "`frozen`, `slots` and `order` keep a programmer from a mistake and change no result",
    "type checking": "the block is for the type checker only",
    "protocol": "the bodies of a protocol's methods are never run",
    "identity": "`is` and `==` say the same of enum members, None and literals",
    "cache": "without `@cache` or `@cached_property` the same value is computed again",
}
