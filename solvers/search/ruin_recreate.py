"""
Schedules improved by taking a few requests out and putting them back elsewhere, few steps and stages dearer.

Ruin and recreate (Schrimpf et al. 2000): requests near each other, those of a prefill stage, or those in
the way once some steps are cut out start anew, at a stage that there is already if they fit any. What every
round holds is kept as an array, so that all starts of a request are tried at once. What fits nowhere is left
out for the time being, at a price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.workload import numbered_rows
from .backward import schedule_backwards

MOST_STEPS = 200_000
"""Rounds up to which this is worth while: each step takes a time in proportion to them."""

HOT, COLD = 1.0, 0.05
"""Temperatures at the start and the end, in costs of a prefill stage."""

LEAST_HOT, LEAST_COLD = 0.3, 0.02
"""The least they are, in costs of a decode step."""

LEFT_OUT = (0.8, 3.0)
"""What a request left out is charged at the start and the end, in the steps that it would fill alone."""

LONGER = 0.5
"""How much more a longer one is charged, as a power of its decode steps: it finds a place less easily."""

CUT = 0.15
"""How often decode steps are cut out."""

CUT_IN_PART = 0.2
"""How often of that where requests are left out already."""

STAGE = 0.4
"""How often a stage is given up otherwise."""

GROUP = 0.5
"""How often, otherwise, it is requests of a group that start apart, where prompts are computed again."""

TOGETHER = 0.8
"""How often one of such a group starts with another of it if it can."""

MOST = 6
"""Most requests taken out for being near others, or being anywhere."""

FORCED = 0.3
"""How often one that is left out is put somewhere all the same, and what is in its way is taken out."""

TRIED = 8
"""Most stages of which it goes to the one with the most room."""

PATIENCE = 0.25
"""The share of a walk after which one that has left requests out all along goes back to the best schedule."""

NEAR = 0.02
"""How near they are, as a share of the decode steps."""

FULL = 1 << 40
"""Tokens held where no slot is free: more than any capacity."""


@dataclass(slots=True)
class _State:
    """
    Where requests start, and what every decode step holds.

    start: The decode step before which each is prefilled, -1 for those left out, shape (requests,).
    held, active: Tokens held and requests under way in each decode step, shape (decode_steps,).
    height: What is held more than at the first step if all that is new comes from growing: what is held and
        the number of the decode step, :data:`FULL` where no slot is free, shape (decode_steps,).
    stage, tokens: Requests and prompt tokens prefilled before each decode step, shape (decode_steps + 1,).
    begin, end: Nothing runs before the one and from the other on.
    shared: Tokens of shared prompts computed, each once in every stage that needs it.
    """

    start: IntArray
    held: IntArray
    active: IntArray
    height: IntArray
    stage: IntArray
    tokens: IntArray
    begin: int
    end: int
    shared: int

    def copy(self) -> _State:
        return _State(
            self.start.copy(),
            self.held.copy(),
            self.active.copy(),
            self.height.copy(),
            self.stage.copy(),
            self.tokens.copy(),
            self.begin,
            self.end,
            self.shared,
        )


class RuinRecreate:
    """
    An annealing walk over schedules, each a few requests away from the last.

    problem: The problem scheduled, whose decode steps cost something.
    rng: Draws what is taken out, and where it goes.
    schedule: The schedule to begin with; requests of no step go last. Some of those are left out at first
        without which it would keep the KV capacity.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, schedule: Schedule) -> None:
        self._problem, self._rng = problem, rng
        self._running = np.flatnonzero(problem.decode_steps > 0)
        self._decode_steps, self._prompt = (
            problem.decode_steps[self._running],
            problem.prompt_tokens[self._running],
        )
        self._first = problem.kv_at_start[self._running]
        self._prefix = problem.prefix_of[self._running]
        if problem.keeps_every_prefix:
            # Wherever they start, each is computed once.
            self._prefix = np.full_like(self._prefix, -1)
        self._members = [np.flatnonzero(self._prefix == each) for each in range(int(self._prefix.max()) + 1)]
        self._capacity = FULL // 2 if problem.kv_capacity is None else problem.kv_capacity
        cost, area = problem.cost, (self._first + self._decode_steps / 2) / self._capacity
        alone = self._decode_steps * np.maximum(area, 1.0 / problem.slots)
        self._charge = cost.decode_base * alone * (self._decode_steps / self._decode_steps.mean()) ** LONGER
        self._curved = problem.reaches_bend or cost.prefill_floor > cost.prefill_base
        self._stage = float(self._stage_seconds(np.array([float(self._prompt.mean())]))[0])
        # Room for the requests left out to start before all others.
        margin = int(self._decode_steps.max())
        start = margin + schedule.starts[schedule.bin_of[self._running]]
        end = int((start + self._decode_steps).max())
        self._time, self._length = np.arange(end), self._decode_steps.tolist()
        self._at = self._state(self._within_cap(start), int(start.min()), end)
        self._in_the_way()
        self._weight = LEFT_OUT[0]
        self._whole = None if (self._at.start < 0).any() else self._at
        self._best = np.inf if self._whole is None else self._charged(self._whole)
        self._least, self._since = np.inf, 0.0

    def step(self, done: float) -> Schedule | None:
        """
        Change the schedule, and return it if nothing is left out and it is the best one met so far.

        done: The share of the walk that is over, 0 to 1.
        """
        rng, cost = self._rng, self._problem.cost
        self._weight = LEFT_OUT[0] * (LEFT_OUT[1] / LEFT_OUT[0]) ** done
        self._go_back_if_stuck(done)
        before, now = self._at, self._charged(self._at)
        self._at = before.copy()
        self._put_back(self._taken_out())
        self._drop_idle_ends()
        hot = max(HOT * self._stage, LEAST_HOT * cost.decode_base)
        cold = max(COLD * self._stage, LEAST_COLD * cost.decode_base)
        changed = self._charged(self._at)
        if changed > now + hot * (cold / hot) ** done * rng.exponential():
            self._at = before
            return None
        return self._complete() if changed < self._best else None

    def _go_back_if_stuck(self, done: float) -> None:
        """Go on from the best schedule if too many steps have been cut out for what is left out since."""
        if not (self._at.start < 0).any():
            self._since = done
        elif self._whole is not None and done - self._since > PATIENCE:
            self._at, self._since = self._whole, done

    def _complete(self) -> Schedule | None:
        """Return the schedule if it is the best one so far once those left out run before all others."""
        left = np.flatnonzero(self._at.start < 0)
        after, complete = self._at, True
        if len(left):
            if (least := self._charged(self._at, LEFT_OUT[1])) >= self._least:
                return None
            self._least, self._at = least, after.copy()
            for request in left[np.argsort(-self._decode_steps[left], kind="stable")].tolist():
                complete = complete and self._put(request, 0, last=True)
            self._at.begin = int(self._at.start.min())
        found, self._at = self._at, after
        seconds = self._charged(found)
        if not complete or seconds >= self._best:
            return None
        self._best, self._whole = seconds, found
        self._least = min(self._least, seconds)
        return schedule_backwards(self._problem, self._running, found.end - found.start)

    def _stage_seconds(self, tokens: IntArray | FloatArray) -> FloatArray:
        """Return what stages cost but for what every token does."""
        cost = self._problem.cost
        seconds: FloatArray = cost.prefill_seconds(tokens) - cost.prefill_per_token * tokens
        return seconds

    def _charged(self, state: _State, weight: float | None = None) -> float:
        """Return the seconds that can be changed, with the charge for requests left out."""
        stages = state.stage.nonzero()[0]
        curved = self._curved and len(stages)
        prefill = (
            float(self._stage_seconds(state.tokens[stages]).sum()) if curved else self._stage * len(stages)
        )
        left_out = float(self._charge[state.start < 0].sum())
        decode_steps = self._problem.cost.decode_base * (state.end - state.begin)
        prefill += self._problem.cost.prefill_per_token * state.shared
        return decode_steps + prefill + (self._weight if weight is None else weight) * left_out

    def _within_cap(self, start: IntArray) -> IntArray:
        """Return the starts without those of requests that several stages in one step are needed for."""
        cap, within, tokens = self._problem.prefill_token_cap, start.copy(), dict[int, int]()
        for request, at in enumerate(start.tolist() if cap is not None else ()):
            tokens[at] = tokens.get(at, 0) + int(self._prompt[request])
            if cap is not None and tokens[at] > cap:
                tokens[at] -= int(self._prompt[request])
                within[request] = -1
        return within

    def _state(self, start: IntArray, begin: int, end: int) -> _State:
        """Return the state of some starts."""
        here, size = np.flatnonzero(start >= 0), len(self._time)
        at, ends = start[here], start[here] + self._decode_steps[here]
        less = np.bincount(ends, minlength=size + 1)
        stage = np.bincount(at, minlength=size + 1)
        active = np.cumsum(stage - less).astype(np.int64)[:size]
        # A request holds the decode step's number more than its first tokens less its start.
        offset = self._first[here] - at
        base = np.cumsum(np.bincount(at, offset, size + 1) - np.bincount(ends, offset, size + 1))[:size]
        held = np.rint(base).astype(np.int64) + active * self._time
        tokens = np.bincount(at, self._prompt[here], size + 1).astype(np.int64)
        prefix = self._prefix[here]
        _, first = np.unique(numbered_rows(at, prefix), return_index=True)
        pairs = prefix[first]
        shared = int(self._problem.prefix_tokens[pairs[pairs >= 0]].sum())
        state = _State(start, held, active, held.copy(), stage, tokens, begin, end, shared)
        self._raise(state, slice(0, size))
        return state

    def _raise(self, state: _State, span: slice) -> None:
        """Bring the heights of some rounds up to date."""
        height = state.held[span] + self._time[span]
        height[state.active[span] >= self._problem.slots] = FULL
        state.height[span] = height

    def _change(self, request: int, start: int, sign: int) -> None:
        """Count a request in the decode steps from its start on, or no longer."""
        state, decode_steps = self._at, self._length[request]
        span = slice(start, start + decode_steps)
        held, first, grown = state.held[span], self._first[request], self._time[:decode_steps]
        if sign > 0:
            held += grown
            held += first
        else:
            held -= grown
            held -= first
        state.active[span] += sign
        self._raise(state, span)
        state.stage[start] += sign
        state.tokens[start] += sign * self._prompt[request]
        state.start[request] = -1
        prefix = int(self._prefix[request])
        if prefix >= 0 and not (state.start[self._members[prefix]] == start).any():
            state.shared += sign * int(self._problem.prefix_tokens[prefix])
        if sign > 0:
            state.start[request] = start

    def _taken_out(self) -> list[int]:
        """Take requests out, and return them with those left out before."""
        rng, state = self._rng, self._at
        left_out, out = (state.start < 0).nonzero()[0].tolist(), list[int]()
        if left_out and rng.random() < FORCED:
            return [*self._forced(left_out), *(each for each in left_out if state.start[each] < 0)]
        kind = rng.random()
        if kind < CUT and (not left_out or rng.random() < CUT_IN_PART):
            out = self._cut()
        elif kind < CUT + STAGE:
            out = self._stage_given_up()
        elif self._members and rng.random() < GROUP:
            out = self._apart()
        state = self._at
        here = (state.start >= 0).nonzero()[0]
        count = min(len(here), int(rng.integers(1, MOST + 1)))
        if rng.random() < 0.2:
            near = rng.choice(here, count, replace=False)
        else:
            around = int(rng.integers(state.begin, state.end))
            if out and state.start[out[0]] >= 0:
                around = int(state.start[out[0]])
            spread = rng.exponential(NEAR * (state.end - state.begin), len(here))
            near = here[np.argsort(np.abs(state.start[here] - around) + spread)[:count]]
        for request in dict.fromkeys([*out, *near.tolist()]):
            if state.start[request] >= 0:
                self._change(request, int(state.start[request]), -1)
        return list(dict.fromkeys([*left_out, *out, *near.tolist()]))

    def _forced(self, left_out: list[int]) -> list[int]:
        """Put one of those left out where little stands against it, and return what is then in the way."""
        rng, state = self._rng, self._at
        request = left_out[int(rng.integers(len(left_out)))]
        room = self._room(request, state.begin)
        stages = np.flatnonzero(state.stage[state.begin : state.begin + len(room)])
        if not len(stages):
            return []
        tried = stages[rng.integers(len(stages), size=1 + int(rng.integers(TRIED)))]
        self._change(request, state.begin + int(tried[room[tried].argmax()]), 1)
        return self._in_the_way(request)

    def _stage_given_up(self) -> list[int]:
        """Return the requests of a stage, of few rather than many; none of one of very many."""
        rng, state = self._rng, self._at
        stages = state.stage.nonzero()[0]
        if not len(stages):
            return []
        one, other = (int(stages[rng.integers(len(stages))]) for _ in range(2))
        if state.stage[other] < state.stage[one] and rng.random() < 0.7:
            one = other
        members = np.flatnonzero(state.start == one)
        if len(members) > 3 * MOST:
            members = rng.choice(members, MOST, replace=False) if self._curved else members[:0]
        return members.tolist()

    def _apart(self) -> list[int]:
        """Return a request where another of its group starts, and one of that group that starts elsewhere."""
        rng, state = self._rng, self._at
        one = int(rng.integers(len(self._prefix)))
        if self._prefix[one] < 0 or state.start[one] < 0:
            return []
        others = self._members[self._prefix[one]]
        others = others[(state.start[others] >= 0) & (state.start[others] != state.start[one])]
        return [one, int(rng.choice(others))] if len(others) else []

    def _cut(self) -> list[int]:
        """Cut steps out, what starts later or earlier moved there, and return what is then in the way."""
        rng, state = self._rng, self._at
        fewer, kind = min(int(rng.geometric(0.3)), state.end - state.begin - 1), rng.random()
        here = (state.start >= 0).nonzero()[0]
        start, begin, end = state.start.copy(), state.begin, state.end
        if kind < 0.3:
            begin += fewer
            start[here] = np.maximum(start[here], begin)
        elif kind < 0.5:
            end -= fewer
            start[here] = np.minimum(start[here], end - self._decode_steps[here])
        else:
            at, later = int(rng.integers(begin, end)), rng.random() < 0.5
            moved = here[(start[here] <= at) == later]
            start[moved] += fewer if later else -fewer
            begin, end = (begin + fewer, end) if later else (begin, end - fewer)
        gone = here[(start[here] < begin) | (start[here] + self._decode_steps[here] > end)]
        start[gone] = -1
        self._at = self._state(start, begin, end)
        return [*gone.tolist(), *self._in_the_way()]

    def _in_the_way(self, kept: int = -1) -> list[int]:
        """Take out requests until no step holds too much and no stage has too many tokens; return them."""
        rng, state, out = self._rng, self._at, list[int]()
        cap = self._problem.prefill_token_cap
        while True:
            full = (state.held > self._capacity) | (state.active > self._problem.slots)
            over = np.flatnonzero(full)
            if len(over):
                at = int(over[rng.integers(len(over))])
                begun = (state.start >= 0) & (state.start <= at)
                among = np.flatnonzero(begun & (state.start + self._decode_steps > at))
            elif cap is not None and (state.tokens > cap).any():
                among = np.flatnonzero(state.start == int((state.tokens > cap).argmax()))
            else:
                return out
            among = among[among != kept]
            few = among[rng.integers(len(among), size=2)]
            request = int(few[self._charge[few].argmin()])
            self._change(request, int(state.start[request]), -1)
            out.append(request)

    def _put_back(self, requests: list[int]) -> None:
        """Put requests where they fit, in an order that is drawn; leave out those that fit nowhere."""
        rng, kind = self._rng, self._rng.random()
        of = np.array(requests, dtype=np.int64)
        keys = self._charge[of]
        if kind > 0.8:
            keys = rng.random(len(of))
        elif kind > 0.4:
            keys = self._decode_steps[of] if kind < 0.7 else self._decode_steps[of] + self._first[of]
        keys = keys * (1 + 0.1 * rng.normal(size=len(of)))
        for request in of[np.argsort(-keys, kind="stable")].tolist():
            self._put(request, self._at.begin)

    def _drop_idle_ends(self) -> None:
        """Let the decode steps begin with the first of all requests, and end with the last."""
        state = self._at
        here = state.start >= 0
        if here.any():
            state.begin = int(state.start[here].min())
            state.end = int((state.start + self._decode_steps)[here].max())

    def _put(self, request: int, begin: int, *, last: bool = False) -> bool:
        """Put a request at a stage or a step from some step on, the last one if told to, if it fits any."""
        room = self._room(request, begin)
        state, prompt = self._at, int(self._prompt[request])
        if self._problem.prefill_token_cap is not None:
            full = state.tokens[begin : begin + len(room)] + prompt > self._problem.prefill_token_cap
            room[full] = -1
        stages = state.stage[begin : begin + len(room)].nonzero()[0]
        stages = stages[room[stages] >= 0]
        if self._curved and len(stages):
            stages = stages[self._worth_joining(begin + stages, prompt)]
        if self._prefix[request] >= 0 and self._rng.random() < TOGETHER:
            others = state.start[self._members[self._prefix[request]]]
            with_group = stages[np.isin(begin + stages, others)]
            stages = with_group if len(with_group) else stages
        places = stages
        if not len(stages):
            if self._stage > self._weight * self._charge[request] and not last:
                return False
            places = (room >= 0).nonzero()[0]
        if not len(places):
            return False
        draw = 0.6 if last else self._rng.random()
        if draw < 0.5 and len(stages):
            place = int(places[room[places].argmin()])
        elif draw < 0.7:
            place = int(places[-1])
        else:
            place = int(places[self._rng.integers(len(places))])
        self._change(request, begin + place, 1)
        return True

    def _worth_joining(self, stages: IntArray, prompt: int) -> IntArray:
        """Return which stages cost hardly more with a prompt than the one where it costs least."""
        tokens = self._at.tokens[stages]
        more = self._stage_seconds(tokens + prompt) - self._stage_seconds(tokens)
        if more.min() > float(self._stage_seconds(np.array([prompt]))[0]):
            return np.zeros(0, dtype=np.int64)
        worth: IntArray = np.flatnonzero(more <= max(0.0, float(more.min()) + 0.1 * self._stage))
        return worth

    def _room(self, request: int, begin: int) -> IntArray:
        """Return the tokens left where there are fewest if a request starts at each step from one on."""
        decode_steps, state = self._length[request], self._at
        starts = state.end - begin - decode_steps + 1
        if starts <= 0:
            return np.zeros(0, dtype=np.int64)
        # The most over every window of so many steps: blocks of as many, from either side (van Herk 1992).
        blocks = np.zeros((-(-(state.end - begin) // decode_steps), decode_steps), dtype=np.int64)
        blocks.ravel()[: state.end - begin] = state.height[begin : state.end]
        ahead = np.maximum.accumulate(blocks, axis=1).ravel()
        behind = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
        most = np.maximum(behind[:starts], ahead[decode_steps - 1 : decode_steps - 1 + starts])
        room: IntArray = self._time[begin : begin + starts] - most
        room += self._capacity - int(self._first[request])
        return room
