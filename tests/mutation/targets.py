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
TARGETS: dict[str, tuple[str, ...]] = {
    "systems/pipeline.py": (*RUNS, "tests/unit/test_settings.py", "tests/live/test_cut_off.py"),
    "systems/runtime.py": SERVING,
    "systems/serving.py": SERVING,
    "systems/scheduler.py": ("tests/unit/test_scheduler.py", *RUNS),
    "systems/reconcile.py": ("tests/unit/test_reconcile.py", *RUNS),
    "systems/lifecycle.py": ("tests/unit/test_lifecycle.py", *SERVING),
    "systems/staleness.py": ("tests/unit/test_staleness.py", *RUNS),
    "systems/batching.py": ("tests/unit/test_batching.py", *RUNS, "tests/contract/test_backend.py"),
    "systems/rewards.py": ("tests/unit/test_hops.py", "tests/live/test_cut_off.py"),
    "systems/policies/layouts.py": ("tests/unit/test_reconcile.py", *DECIDES),
    "systems/policies/planner.py": DECIDES,
    "systems/policies/colocated.py": DECIDES,
    "systems/policies/disaggregated.py": DECIDES,
    "systems/policies/pivot.py": DECIDES,
    "harness/studies/stats.py": STUDIES,
    "harness/results/comparable.py": ("tests/unit/test_compare.py", "tests/figures/test_figures.py"),
    "harness/studies/compare.py": ("tests/unit/test_compare.py", "tests/cli/test_sweep.py"),
    "harness/studies/claims.py": ("tests/unit/test_compare.py", "tests/cli/test_sweep.py"),
    "harness/results/summary.py": ("tests/unit/test_tally.py", "tests/figures/test_figures.py"),
    "harness/studies/sweep.py": ("tests/unit/test_compare.py", "tests/cli/test_sweep.py"),
    "harness/results/record.py": (
        "tests/unit/test_log.py", "tests/cli/test_cli.py", "tests/cli/test_endings.py",
    ),
    "harness/results/log.py": ("tests/unit/test_log.py", "tests/cli/test_cli.py"),
}  # fmt: skip

# Places where a mutant cannot change what the program does, so that no test could notice.
EXCLUDED = {
    "annotation": "annotations are not evaluated (`from __future__ import annotations`)",
    "dataclass option": "`frozen`, `slots` and `order` keep a programmer from a mistake and change no result",
    "type checking": "the block is for the type checker only",
    "protocol": "the bodies of a protocol's methods are never run",
    "cache": "without `@cache` or `@cached_property` the same value is computed again",
}
