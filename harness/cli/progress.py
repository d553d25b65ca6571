"""Progress on stderr: the run first, then a line an RL step; with a bar where stderr is a terminal."""

from __future__ import annotations

import time
from types import TracebackType

import rich.console
import rich.progress

from harness.cli.summary import cut_off_step
from harness.results.record import RunDirectory
from harness.results.summary import Tally
from harness.runs.spec import RunSpec, cores
from workloads.groups import architecture_of


class Progress:
    """Follows one run."""

    def __init__(self, spec: RunSpec, quiet: bool) -> None:
        self._spec = spec
        self._quiet = quiet
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("RL steps", total=spec.steps)
        self._began = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, run: RunDirectory) -> None:
        group, spec = self._spec.group, self._spec
        self._say(f"run {run.id}")
        self._say(f"path {run.path}")
        self._say(
            f"{spec.kind}: {spec.system} on {group.name} = {self._cast()}, staleness <= {spec.staleness}"
        )
        for name in group.custom:
            model = architecture_of(group, name)
            billions, active = model.params_total / 1e9, model.params_active / 1e9
            kib = model.kv_bytes_per_token / 1024
            self._say(
                f"{name}: {billions:.2f} B parameters, {active:.2f} B active, "
                f"{kib:.0f} KiB of KV cache a token"
            )
        if spec.trace is not None:
            self._say(f"lengths of {spec.trace.file}: {spec.trace.describe()}")
        if not spec.on.real:
            why = "is too large to be real here" if group.real is None else "was asked for without weights"
            self._say(f"{group.name} {why}: lengths and durations are simulated, nothing is learned")
        if not self._quiet:
            self._bar.start()

    def _cast(self) -> str:
        """Models and devices, in words."""
        spec, pair, cluster = self._spec, self._spec.group.pair, self._spec.group.cluster
        if spec.on.measured:
            shared = f" on {cores()} cores: oversubscribed" if cluster.gpus > cores() else ""
            return f"its tiny policy and judge, {cluster.gpus} worker processes{shared}"
        real = f"; real tiny weights stand for them, 1 token for {cluster.token_scale}" if (
            spec.on.real
        ) else ""  # fmt: skip
        return f"policy {pair.policy} + judge {pair.judge}{real}; {cluster.gpus} x {cluster.hardware.upper()}"

    def stepped(self, tally: Tally) -> None:
        step = tally.steps[-1]
        learned = (
            f"  reward {step['reward']:.3f}  true {step['true_accuracy']:.3f}"
            if step["reward"] is not None
            else ""
        )
        self._say(
            f"step {step['step'] + 1:>3}/{self._spec.steps}  {step['step_s']:8.1f} s{learned}  "
            f"tokens {step['response_tokens_mean']:.0f} + {step['judge_tokens_mean']:.0f}  "
            f"staleness {step['staleness_mean']:.2f}  wall {time.perf_counter() - self._began:.0f} s"
            f"{cut_off_step(step)}"
        )
        self._bar.advance(self._task)

    def warn(self, warnings: list[str]) -> None:
        """What a reader of the result must be told, also where its text is not looked at."""
        for line in warnings:
            self._say(f"warning: {line}")

    def mirrored(self, how: str) -> None:
        """A mirror that failed is worth a line; the run is complete without it."""
        if how.startswith("failed"):
            self._say(f"the W&B mirror {how}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False)
