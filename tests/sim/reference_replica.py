"""The oracle: the same engine, one step at a time, with plain lists and nothing clever. Written separately.

Every step is scheduled anew and costs what its contents cost. No prefixes are shared here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from systems.costs.durations import BLOCK, Bounds, Costs


@dataclass
class One:
    id: int
    context: int
    remaining: int
    generated: int = 0
    cached: int = 0
    reading: bool = True
    brought: int = 0  # context tokens whose cache comes along


@dataclass
class Reference:
    """Feed it arrivals (time, id, context, remaining, brought along); it returns (id, time) of all ends."""

    costs: Costs
    bounds: Bounds
    running: list[One] = field(default_factory=list)
    waiting: list[One] = field(default_factory=list)
    preemptions: list[tuple[int, int]] = field(default_factory=list)  # (id, tokens generated)
    time: float = 0.0

    def blocks(self) -> int:
        return sum(-(-one.cached // BLOCK) for one in self.running)

    def preempt(self) -> One:
        victim = self.running.pop()
        self.preemptions.append((victim.id, victim.generated))
        victim.cached, victim.reading, victim.brought = 0, True, 0
        self.waiting.insert(0, victim)
        return victim

    def run(self, arrivals: list[tuple[float, int, int, int, int]]) -> list[tuple[int, float]]:
        todo, ends = list(arrivals), []
        while todo or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.time = max(self.time, todo[0][0])
            while todo and todo[0][0] <= self.time:
                _, number, context, remaining, *held = todo.pop(0)
                self.waiting.append(One(number, context, remaining, brought=held[0] if held else 0))
            ends.extend(self.step())
        return ends

    def step(self) -> list[tuple[int, float]]:
        capacity, count = self.bounds.blocks, len(self.preemptions)
        while True:  # blocks for the tokens of those that generate
            need = sum(one.cached % BLOCK == 0 for one in self.running if not one.reading)
            if self.blocks() + need <= capacity or len(self.running) == 1:
                break
            self.preempt()
        need = sum(one.cached % BLOCK == 0 for one in self.running if not one.reading)
        chunks: dict[int, int] = {}

        def spare() -> int:
            need = sum(one.cached % BLOCK == 0 for one in self.running if not one.reading)
            taken = sum(
                -(-(one.cached + chunks.get(one.id, 0)) // BLOCK) - -(-one.cached // BLOCK)
                for one in self.running
            )
            return capacity - self.blocks() - taken - need

        def budget() -> int:
            deciding = sum(not one.reading for one in self.running)
            return self.bounds.token_budget - deciding - sum(chunks.values())

        for one in [one for one in self.running if one.reading]:
            while one in self.running and budget() > 0:
                chunk = min(one.context + one.generated - one.cached, budget())
                blocks = -(-(one.cached + chunk) // BLOCK) - -(-one.cached // BLOCK)
                if blocks <= spare() or len(self.running) == 1:
                    chunks[one.id] = chunk
                    break
                chunks.pop(self.preempt().id, None)
        while budget() > 0 and len(self.preemptions) == count and self.waiting:
            one = self.waiting[0]
            if len(self.running) >= self.bounds.max_running:
                break
            held = min(one.brought, one.context - 1)
            chunk = min(one.context + one.generated - held, budget())
            if -(-(held + chunk) // BLOCK) > spare() and self.running:
                break
            one.cached = held
            self.running.append(self.waiting.pop(0))
            chunks[one.id] = chunk
        return self.execute(chunks)

    def execute(self, chunks: dict[int, int]) -> list[tuple[int, float]]:
        generating = [one for one in self.running if not one.reading]
        kv = sum(one.cached for one in generating)
        if not chunks:
            self.time += self.costs.alpha_s(len(generating)) + self.costs.beta_s(len(generating)) * kv
        else:
            read = [one for one in self.running if one.id in chunks]
            pairs = sum(chunks[o.id] * o.cached + chunks[o.id] * (chunks[o.id] + 1) / 2 for o in read)
            context = sum(one.cached + chunks[one.id] for one in read)
            starting = sum(one.cached + chunks[one.id] == one.context + one.generated for one in read)
            self.time += self.costs.mixed_s(
                len(generating), kv, sum(chunks.values()), pairs, context, starting
            )
        for one in generating:
            one.cached += 1
            one.generated += 1
            one.remaining -= 1
        for one in self.running:
            if one.id in chunks:
                one.cached += chunks[one.id]
                if one.cached == one.context + one.generated:
                    one.reading = False
                    one.generated += 1
                    one.remaining -= 1
        ended = [(one.id, self.time) for one in self.running if one.remaining <= 0 and not one.reading]
        self.running = [one for one in self.running if one.remaining > 0 or one.reading]
        return ended
