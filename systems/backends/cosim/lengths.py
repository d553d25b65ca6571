"""A `LengthSource` that really generates: a sequence ends where its model ends it.

Invariants
* The continuation of a sequence is generated from its context under the policy version of the replica
  that runs it. When it is aborted, its unused part is thrown away; whoever continues it generates the
  rest anew, from a re-prefill.
* Generation is batched over all sequences that are known to be needed soon, and judgements are
  prepared when their responses are. Neither can change a token, because noise and arithmetic belong
  to a sequence and not to its batch (`systems/model`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from systems.backends.base import Work
from systems.model.config import ModelConfig
from systems.model.engine import Engine, Request
from systems.model.sampling import Sampler
from systems.model.serving import ServingModel
from systems.types import End, Prompt, Role

AHEAD = 256  # judgements prepared together at most
TOGETHER = 48  # sequences decoded together: attention is padded to the longest of them, so fewer is faster
REMEMBERED = 4096  # judgements kept by prompt: the same short answers are judged again and again


@dataclass(frozen=True, slots=True)
class Serving:
    """How one role's model generates."""

    sampler: Sampler
    stop: int
    max_new: int


@dataclass(slots=True)
class _Continuation:
    version: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class PolicyVersions:
    """Published weights as models to serve, the newest few."""

    def __init__(self, config: ModelConfig, keep: int) -> None:
        self._config = config
        self._keep = keep
        self._states: dict[int, Mapping[str, Tensor]] = {}
        self._models: dict[int, ServingModel] = {}

    def put(self, version: int, state: Mapping[str, Tensor]) -> None:
        self._states[version] = state
        for old in [v for v in self._states if v <= version - self._keep]:
            del self._states[old]
            self._models.pop(old, None)

    def get(self, version: int) -> ServingModel:
        if version not in self._models:
            self._models[version] = ServingModel(self._config, self._states[version])
        return self._models[version]

    def state(self, version: int) -> Mapping[str, Tensor]:
        return self._states[version]


class EngineLengths:
    """Continuations from the policy at any published version and from the judge."""

    def __init__(
        self, policy: PolicyVersions, judge: ServingModel, serving: Mapping[Role, Serving],
        judge_prompt: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]],
    ) -> None:  # fmt: skip
        self._policy = policy
        self._engines = {
            role: Engine(judge, one.sampler, one.stop, TOGETHER) for role, one in serving.items()
        }
        self._serving = serving
        self._judge_prompt = judge_prompt
        self._known: dict[int, _Continuation] = {}  # by sequence
        self._announced: dict[tuple[Role, int], dict[int, Work]] = {}
        self._to_judge: dict[tuple[int, ...], None] = {}  # prompts that a judge will probably see
        self._judged: dict[tuple[int, ...], _Continuation] = {}

    def announce(self, work: Work, version: int) -> None:
        self._announced.setdefault((work.role, version), {})[work.id] = work

    def remaining(self, work: Work, version: int) -> int:
        return len(self._continuation(work, version).tokens)

    def tokens(self, work: Work, version: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        if not count:
            return (), ()
        known = self._continuation(work, version)
        return known.tokens[:count], known.logprobs[:count]

    def end(self, work: Work, version: int) -> End:
        stopped = self._continuation(work, version).tokens[-1] == self._serving[work.role].stop
        return End.STOP if stopped else End.LENGTH

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self._known.pop(sequence, None)
        for waiting in self._announced.values():
            for sequence in sequences:
                waiting.pop(sequence, None)

    def _continuation(self, work: Work, version: int) -> _Continuation:
        known = self._known.get(work.id)
        if known is None or known.version != version or known.start != work.length:
            if work.role is Role.REWARD:
                self._prepare_judgements(work, version)
            else:
                self._generate_all(work, version)
            known = self._known[work.id]
        return known

    def _generate_all(self, work: Work, version: int) -> None:
        """Generate this one and all others that were announced for the same model."""
        works = self._announced.pop((work.role, version), {})
        works[work.id] = work
        batch = list(works.values())
        for one, request in zip(batch, self._generate(batch, version), strict=True):
            self._known[one.id] = _taken(request, version, one.length)
            if work.role is Role.ROLLOUT:
                self._expect_judgement(self._judge_prompt(one.prompt.tokens, tuple(request.tokens)))

    def _generate(self, works: list[Work], version: int) -> list[Request]:
        """Generate all of these to their ends, shortest context first; returned in the order given."""
        role = works[0].role
        engine, max_new = self._engines[role], self._serving[role].max_new
        if role is Role.ROLLOUT:
            engine.model = self._policy.get(version)
        requests = [
            Request(
                id=work.id,
                key=work.key,
                prompt=work.prompt.tokens,
                max_new=max_new,
                tokens=list(work.tokens),
                logprobs=[0.0] * work.length,
            )
            for work in works
        ]
        engine.run(sorted(requests, key=lambda request: (len(request.context), request.id)))
        return requests

    def _expect_judgement(self, prompt: tuple[int, ...]) -> None:
        if prompt not in self._judged:
            self._to_judge[prompt] = None

    def _prepare_judgements(self, work: Work, version: int) -> None:
        """Judge this response, and those that will be complete soon, in one batch.

        A greedy judgement depends on its prompt only, so one may be made before it is asked for. If the
        response changes meanwhile, its prompt does, and the judgement is made anew.
        """
        fresh = work.length == 0 and self._serving[Role.REWARD].sampler.temperature == 0
        if not fresh:
            self._generate_all(work, version)
            return
        prompt = work.prompt.tokens
        if prompt not in self._judged:
            self._to_judge.pop(prompt, None)
            ahead = [prompt, *list(self._to_judge)[: AHEAD - 1]]
            for done in ahead[1:]:
                del self._to_judge[done]
            works = [work._replace(id=i, prompt=Prompt(len(p), p)) for i, p in enumerate(ahead)]
            for asked, request in zip(ahead, self._generate(works, version), strict=True):
                self._judged[asked] = _taken(request, version, 0)
        self._known[work.id] = self._judged[prompt]
        while len(self._judged) > REMEMBERED:
            del self._judged[next(iter(self._judged))]
        self._announced.get((work.role, version), {}).pop(work.id, None)


def _taken(request: Request, version: int, start: int) -> _Continuation:
    return _Continuation(version, start, tuple(request.tokens[start:]), tuple(request.logprobs[start:]))
