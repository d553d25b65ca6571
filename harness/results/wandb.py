"""Weights & Biases as a mirror: a process of its own, fed one JSON line a step.

Local files are the truth. W&B is imported by the child only, so that whatever it does (hang, die, be slow,
be absent) the run and its numbers are the same; a measured run is mirrored when it is over. Names are verl's
where it has one.

    python -m harness.results.wandb    the child; reads lines {"init": ...}, {"log": ...}, {"summary": ...}
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from harness.errors import UnfitError, unknown
from systems.events import RunBegan, encode
from systems.machine import processes

MODES = ("online", "offline", "disabled")
PROJECT = "pivot-bench"
# Variables that say where results go, and how to get there. All others (a run's id, name, group, sweep, tags,
# what it resumes or forks from) would make every run the same one.
WHERE = (
    "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR",
    "WANDB_DATA_DIR", "WANDB_HTTP_TIMEOUT", "WANDB_INIT_TIMEOUT", "WANDB_INSECURE_DISABLE_SSL",
)  # fmt: skip
PATIENCE_S = 30.0  # how long a finished run waits for its mirror

NAMES = {  # our step fields, in verl's names and in names like them
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "reward_s": "timing_s/reward",
    "train_s": "timing_s/update_actor",
    "wait_for_batch_s": "timing_s/wait_for_batch",
    "wait_for_trainer_s": "timing_s/wait_for_trainer",
    "reward": "critic/score/mean",
    "true_accuracy": "critic/true_accuracy/mean",
    "response_tokens_mean": "response_length/mean",
    "response_tokens_max": "response_length/max",
    "judge_tokens_mean": "judge_length/mean",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
}
SHARES = {  # of a step's responses and judgements: counts are not comparable between recipes
    "response_length/clip_ratio": ("responses_truncated", "responses"),
    "judge_length/clip_ratio": ("judgements_truncated", "judgements"),
    "judge/unparsable_ratio": ("verdicts_unparsable", "judgements"),
    "judge/unparsable_clip_ratio": ("unparsable_truncated", "judgements"),
}


def metrics(step: Mapping[str, Any], gpus: int) -> dict[str, float]:
    """A step of the summary under the names of the mirror; what is not known is left out."""
    named = {NAMES[key]: value for key, value in step.items() if key in NAMES and value is not None}
    learned = {
        f"actor/{key.removeprefix('learn_')}": v for key, v in step.items() if key.startswith("learn_")
    }
    shares = {
        name: step[count] / step[of] for name, (count, of) in SHARES.items() if step.get(count) is not None
    }
    tokens = step["policy_tokens"] + step["judge_tokens"]
    return {**named, **shares, **learned, "perf/throughput": tokens / step["step_s"] / gpus}


def chosen_mode(asked: str | None) -> str:
    """`asked`, or $WANDB_MODE, or offline; disabled where W&B is not installed and nobody asked for it."""
    asked = asked or os.environ.get("WANDB_MODE")
    if asked is not None and asked not in MODES:
        raise unknown("W&B mode", asked, MODES)
    installed = importlib.util.find_spec("wandb") is not None
    if asked in ("online", "offline") and not installed:
        raise UnfitError(f"--wandb {asked} needs 'wandb': pip install 'pivot-bench[wandb]'")
    return asked or ("offline" if installed else "disabled")


def surroundings() -> dict[str, str]:
    """The child's environment. Where results go (entity, server, key) is the user's to say there; which run
    this is, is not: a variable that names one would give its name to all cells of a sweep."""
    kept = processes.environment(WANDB_SILENT="true")
    foreign = [key for key in kept if key.startswith("WANDB_") and key not in (*WHERE, "WANDB_SILENT")]
    return {key: value for key, value in kept.items() if key not in foreign}


class Mirror:
    """One run's mirror. No method raises, and none waits but `finish`, for `patience_s` at most."""

    def __init__(self, mode: str, patience_s: float = PATIENCE_S, command: tuple[str, ...] = ()) -> None:
        self.mode = mode
        self._patience_s = patience_s
        self._command = command or processes.command(__name__)
        self._child: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._unsent = bytearray()
        self._gpus = 1

    def begin(self, run: str, directory: Path, facts: RunBegan) -> None:
        """Start the child. `facts` are the run's first event."""
        if self.mode == "disabled":
            return
        self._gpus = facts.gpus
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `finish`
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said,
                start_new_session=True, env=surroundings(),
            )  # fmt: skip
        except OSError:
            return
        os.set_blocking(self._pipe(), False)
        config = {name: value for name, value in encode(facts).items() if name not in ("t", "kind", "floor")}
        self._send({"init": {"mode": self.mode, "name": run, "dir": str(directory), "config": config}})

    def step(self, step: Mapping[str, Any]) -> None:
        if self._child is not None:
            self._send({"log": metrics(step, self._gpus), "step": step["step"]})

    def finish(self, summary: Mapping[str, Any] | None) -> str:
        """Wait for the child, and say how it went, in a word or a line."""
        if self.mode == "disabled" or self._said is None:
            return "disabled" if self.mode == "disabled" else "nothing was mirrored"
        if self._child is None:
            return "failed: it could not be started"
        kept = ("makespan_s", "migrations", "shifts", "weights_sha256", "oversubscribed")
        self._unsent += _line({"summary": {key: (summary or {}).get(key) for key in kept}})
        try:
            os.set_blocking(self._pipe(), True)
            self._child.communicate(bytes(self._unsent), timeout=self._patience_s)
            if self._child.returncode == 0:
                return self.mode
            return f"failed: {self._last_words() or f'exit code {self._child.returncode}'}"
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return f"failed: it did not end within {self._patience_s:.0f} s"
        finally:
            self._kill()
            if self._said is not None:
                self._said.close()

    def _kill(self) -> None:
        """The child and whatever it has started."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Write what the pipe takes now; the rest stays for the next time."""
        self._unsent += _line(message)
        try:
            sent = os.write(self._pipe(), self._unsent)
            del self._unsent[:sent]
        except OSError:
            pass  # full, or the child is gone: `finish` will tell

    def _pipe(self) -> int:
        """The descriptor that the child reads from."""
        if self._child is None or self._child.stdin is None:
            raise OSError("there is no child")
        return self._child.stdin.fileno()

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    """The child: everything that knows W&B."""
    import wandb

    run: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        if "init" in message:
            settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True)
            run = wandb.init(project=PROJECT, settings=settings, **message["init"])
        elif "log" in message:
            run.log(message["log"], step=message["step"])
        else:
            run.summary.update(message["summary"])
    if run is not None:
        run.finish()


if __name__ == "__main__":
    main()
