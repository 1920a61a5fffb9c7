"""Schedule: bin and slot of each request, decode steps of bins."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .costs.cost import CostModel
from .kept_beginnings import HeldBeginnings, stage_tokens
from .problem import MOST_STEPS, Problem


@dataclass(frozen=True, slots=True)
class Violation:
    """
    First rule of the problem that a schedule breaks.

    request, slot, bin: Place of the violation; None where the rule has no such place.
    """

    rule: str
    message: str
    request: int | None = None
    slot: int | None = None
    bin: int | None = None

    def __str__(self) -> str:
        places = (("request", self.request), ("slot", self.slot), ("bin", self.bin))
        where = ", ".join(f"{name} {place}" for name, place in places if place is not None)
        return f"{self.rule}: {self.message}" + (f" ({where})" if where else "")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Schedule:
    """
    A complete schedule, as three arrays; everything else is derived from them.

    A bin is one prefill stage and the decode steps after it. A request is prefilled in its bin, then decodes
    one token in every decode step until it is done, also in later bins. A later prefill stage delays it, but
    it keeps its slot. A slot freed within a bin is filled in a later bin.

    Parameters
    ----------
    bin_of
        Bin in which each request is prefilled, shape (requests,).
    slot_of
        Slot of each request, shape (requests,).
    decode_steps
        Decode steps of each bin, shape (bins,).

    Raises
    ------
    ValueError
        If an array holds values other than whole numbers.
    """

    bin_of: IntArray
    slot_of: IntArray
    decode_steps: IntArray

    def __repr__(self) -> str:
        slots = int(self.slot_of.max(initial=-1)) + 1
        steps = int(self.decode_steps.sum())
        return (
            f"Schedule({len(self.bin_of):,} requests on {slots:,} slots,"
            f" {len(self.decode_steps):,} bins, {steps:,} decode steps)"
        )

    def __post_init__(self) -> None:
        for name in ("bin_of", "slot_of", "decode_steps"):
            values = np.array(getattr(self, name))
            if values.size and not np.issubdtype(values.dtype, np.integer):
                raise ValueError(f"{name} is of {values.dtype}; it must be of whole numbers")
            column = values.astype(np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    @classmethod
    def from_bins(cls, problem: Problem, bin_of: npt.ArrayLike, decode_steps: npt.ArrayLike) -> Schedule:
        """Return the schedule with given bins; colour intervals for slots.

        Slots are interchangeable, so each bin fills the slots that have been free longest.

        Parameters
        ----------
        problem
            Problem to schedule.
        bin_of
            The bin in which each request is prefilled, shape (requests,).
        decode_steps
            Decode steps of each bin, shape (bins,).

        Raises
        ------
        ValueError
            If more requests overlap than there are slots.
        """
        bins, starts = np.asarray(bin_of), _starts(np.asarray(decode_steps))
        slot_of = np.empty(len(bins), dtype=np.int64)
        order = np.argsort(bins, kind="stable")
        begins = starts[bins[order]]
        columns = (bins[order], begins, begins + problem.decode_steps[order])
        free: list[tuple[int, int, int]] = [(0, -1, slot) for slot in range(problem.slots)]
        slots: list[int] = []
        for k, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            until, last, slot = free[0]
            if until > begin or last == k:
                raise ValueError(f"more than {problem.slots} requests overlap in bin {k}")
            slots.append(slot)
            heapq.heapreplace(free, (end, k, slot))
        slot_of[order] = slots
        return cls(bins, slot_of, np.asarray(decode_steps))

    def without_idle_steps(self, problem: Problem) -> Schedule:
        """Return the schedule without steps in which no slot decodes."""
        runs = self._runs(problem)
        decoding = _starts(np.diff(runs.times) * (runs.active > 0))
        return Schedule(self.bin_of, self.slot_of, np.diff(decoding[runs.at(self.starts)]))

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.decode_steps)

    @property
    def starts(self) -> IntArray:
        """Decode steps before each bin and in total, shape (bins + 1,)."""
        return _starts(self.decode_steps)

    def stage_tokens(self, problem: Problem) -> IntArray:
        """Return the prompt tokens computed in each bin, shape (bins,)."""
        if problem.tree is not None:
            return stage_tokens(problem, self.bin_of, self.decode_steps)
        tokens = np.bincount(self.bin_of, weights=problem.prompt_tokens, minlength=self.bins)
        return tokens.astype(np.int64)

    def prefill_stages(self) -> int:
        """Return the number of bins with a prefill."""
        return len(np.unique(self.bin_of))

    def active(self, problem: Problem) -> IntArray:
        """Return how many slots decode in each step, shape (decode steps,)."""
        return self._summed(problem).astype(np.int64)

    def changes(self, problem: Problem) -> int:
        """Return the number of bursts of steps over the same slots."""
        runs = self._runs(problem)
        return int(np.count_nonzero(runs.changed & (runs.active > 0)))

    def kv_tokens(self, problem: Problem) -> IntArray:
        """Return the KV tokens held in each step, shape (decode steps,)."""
        first, _ = self._step_spans(problem)
        drawn = self.active(problem) * np.arange(self._total)
        return drawn + self._summed(problem, problem.kv_at_start - first).astype(np.int64)

    def stage_seconds(self, problem: Problem) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of each prefill stage and decode step.

        Returns
        -------
        prefill
            Shape (bins,); zero for a bin that prefills nothing.
        decode
            Shape (decode steps,).
        """
        decode = problem.cost.decode_seconds(self.active(problem), self.kv_tokens(problem))
        return self._prefill_seconds(problem), decode

    def finishes(self, problem: Problem) -> FloatArray:
        """Return each request's end in seconds, shape (requests,)."""
        runs = self._runs(problem)
        _, last = self._step_spans(problem)
        # A stage at a request's last decode step runs after it; its own stage always runs before.
        stages = np.maximum(np.searchsorted(self.starts[:-1], last), self.bin_of + 1)
        decoded, prefilled = (
            np.append(0.0, np.cumsum(seconds))
            for seconds in (runs.seconds(problem.cost), self._prefill_seconds(problem))
        )
        done: FloatArray = decoded[runs.at(last)] + prefilled[stages]
        return done

    def makespan(self, problem: Problem) -> float:
        """Return the seconds to the last token, by the cost model.

        A bin waits for the arrival of its requests.
        """
        runs, prefill = self._runs(problem), self._prefill_seconds(problem)
        decode = runs.seconds(problem.cost)
        if not problem.workload.arrival.any():
            return float(prefill.sum() + decode.sum())
        ready = np.zeros(self.bins)
        np.maximum.at(ready, self.bin_of, problem.workload.arrival)
        before = np.append(0.0, np.cumsum(decode))[runs.at(self.starts)]
        time = 0.0
        for k, work in enumerate(prefill + np.diff(before)):
            time = max(time, float(ready[k])) + float(work)
        return time

    def utilization(self, problem: Problem) -> float:
        """Return the seconds of full decode steps, over the makespan.

        As in the hybrid paper (section V): slot-steps of work over the slots, times the seconds of a decode
        step with every slot active, over the makespan. 0 if nothing takes time.
        """
        kv = problem.kv_token_steps / max(1, int(problem.decode_steps.sum())) * problem.slots
        full_step = problem.cost.decode_seconds(problem.slots, round(kv))
        makespan = self.makespan(problem)
        return float(problem.decode_steps.sum()) / problem.slots * full_step / makespan if makespan else 0.0

    def check(self, problem: Problem) -> Violation | None:
        """Return the first rule that this schedule breaks, or None.

        This referee shares no code with the solvers, and walks through the schedule bin by bin.
        """
        for name, count in (
            ("bin_of", len(problem)),
            ("slot_of", len(problem)),
            ("decode_steps", self.decode_steps.size),
        ):
            column = getattr(self, name)
            if column.shape != (count,):
                what = f"{name} has shape {column.shape} for {len(problem)} requests"
                return Violation("every request is scheduled", what)
        if (self.decode_steps < 0).any():
            k = int(np.flatnonzero(self.decode_steps < 0)[0])
            return Violation("decode steps are counted", f"{self.decode_steps[k]} decode steps", bin=k)
        # Checked before counting step by step, as each decode step takes memory.
        total, useful = sum(self.decode_steps.tolist()), int(problem.decode_steps.sum())
        if total > min(useful, MOST_STEPS):
            what = f"{total:,} decode steps for requests of {useful:,} in all, {MOST_STEPS:,} at most"
            return Violation("decode steps are of use", what)
        for name, column, limit in (("bin", self.bin_of, self.bins), ("slot", self.slot_of, problem.slots)):
            wrong = np.flatnonzero((column < 0) | (column >= limit))
            if wrong.size:
                i = int(wrong[0])
                what = f"prefilled in {name} {column[i]} of {limit}"
                return Violation("every request is scheduled", what, request=i)
        return self._check_slots(problem) or self._check_token_cap(problem) or self._check_kv(problem)

    def _check_slots(self, problem: Problem) -> Violation | None:
        end_of_bin = np.cumsum(self.decode_steps)
        start_of_bin = end_of_bin - self.decode_steps
        start = start_of_bin[self.bin_of]
        finish = start + problem.decode_steps
        late = np.flatnonzero(finish > end_of_bin[-1])
        if late.size:
            i = int(late[0])
            what = f"needs {problem.decode_steps[i]} decode steps, {end_of_bin[-1] - start[i]} are left"
            return Violation("every request finishes", what, i, int(self.slot_of[i]), int(self.bin_of[i]))
        order = np.lexsort((self.bin_of, self.slot_of))
        before, after = order[:-1], order[1:]
        clash = (self.slot_of[before] == self.slot_of[after]) & (
            (self.bin_of[before] == self.bin_of[after]) | (finish[before] > start[after])
        )
        if clash.any():
            i, earlier = int(after[clash][0]), int(before[clash][0])
            what = f"request {earlier} still holds the slot"
            return Violation("one request per slot", what, i, int(self.slot_of[i]), int(self.bin_of[i]))
        return None

    def _check_token_cap(self, problem: Problem) -> Violation | None:
        cap = problem.prefill_token_cap
        if cap is None:
            return None
        if problem.tree is not None:
            over = np.flatnonzero(self.stage_tokens(problem) > cap)
            if not over.size:
                return None
            what = f"{self.stage_tokens(problem)[over[0]]} prompt tokens in one prefill stage, {cap} allowed"
            return Violation("token cap of a prefill stage", what, bin=int(over[0]))
        prompts = problem.prompt_tokens.tolist()
        for k, members in enumerate(self._members()):
            tokens = 0
            for i in members:
                tokens += prompts[i]
                if tokens > cap:
                    what = f"{tokens} prompt tokens in one prefill stage, {cap} allowed"
                    return Violation("token cap of a prefill stage", what, request=i, bin=k)
        return None

    def _members(self) -> list[list[int]]:
        """Return the requests of each bin, ascending."""
        members: list[list[int]] = [[] for _ in range(self.bins)]
        for i, k in enumerate(self.bin_of.tolist()):
            members[k].append(i)
        return members

    def _check_kv(self, problem: Problem) -> Violation | None:
        capacity = problem.kv_capacity
        if capacity is None:
            return None
        shared = HeldBeginnings(problem)
        running = kv_tokens = rest = self.decode_steps[:0]
        for k, new in enumerate(self._members()):
            running = np.concatenate((running, np.array(new, dtype=np.int64)))
            shared.count(new, 1)
            total = int(kv_tokens.sum() + problem.held_alone[new].sum()) + shared.tokens
            if total > capacity:
                return Violation("KV capacity", f"a prefill stage holds {total} of {capacity} tokens", bin=k)
            kv_tokens = np.concatenate((kv_tokens, problem.held_at_start[new]))
            rest = np.concatenate((rest, problem.decode_steps[new]))
            steps_left = int(self.decode_steps[k])
            while True:
                left = rest > 0
                shared.count(running[~left].tolist(), -1)
                running, kv_tokens, rest = running[left], kv_tokens[left], rest[left]
                if not (steps_left and rest.size):
                    break
                burst = min(steps_left, int(rest.min()))
                total = int(kv_tokens.sum()) + len(kv_tokens) * (burst - 1) + shared.tokens
                if total > capacity:
                    return Violation(
                        "KV capacity", f"a decode step holds {total} of {capacity} tokens", bin=k
                    )
                kv_tokens, rest = kv_tokens + burst, rest - burst
                steps_left -= burst
        return None

    @property
    def _total(self) -> int:
        return int(self.decode_steps.sum())

    def _step_spans(self, problem: Problem) -> tuple[IntArray, IntArray]:
        first = self.starts[self.bin_of]
        return first, first + problem.decode_steps

    def _prefill_seconds(self, problem: Problem) -> FloatArray:
        seconds = problem.cost.prefill_seconds(self.stage_tokens(problem))
        seconds[np.bincount(self.bin_of, minlength=self.bins) == 0] = 0.0
        return seconds

    def _runs(self, problem: Problem) -> _Runs:
        """Return the runs of decode steps between starts and ends."""
        first, last = self._step_spans(problem)
        end = self._total
        spans = np.minimum(np.concatenate((first, last)), end)
        points = np.concatenate((spans, self.starts))
        # Sorting costs more than an array of the steps, unless few requests take many steps.
        if end <= _STEPS_PER_POINT * len(points):
            there = np.bincount(points) > 0
            times, place = np.flatnonzero(there), (np.cumsum(there) - 1)[spans]
        else:
            # Unique's hash table, or a search for each point, takes longer.
            order = np.argsort(points)
            new = np.diff(points[order], prepend=-1) > 0
            times, place = points[order[new]], np.empty(len(points), dtype=np.int64)
            place[order] = np.cumsum(new) - 1
            place = place[: len(spans)]
        begin, stop = place[: len(first)], place[len(first) :]
        size = len(times)
        kv_tokens = problem.kv_at_start - first
        active = np.cumsum(np.bincount(begin, minlength=size) - np.bincount(stop, minlength=size))[:-1]
        change = np.bincount(begin, kv_tokens, size) - np.bincount(stop, kv_tokens, size)
        # A request holds one more token in each step.
        middle = (times[:-1] + times[1:] - 1) / 2
        changed = np.bincount(place, minlength=size)[:-1] > 0
        return _Runs(times, active, np.cumsum(change)[:-1] + active * middle, changed)

    def _summed(self, problem: Problem, weights: IntArray | None = None) -> npt.NDArray[Any]:
        """Return the number, or weight, of requests in each step."""
        first, last = self._step_spans(problem)
        size = max(self._total, int(last.max())) + 1
        change = np.bincount(first, weights, size) - np.bincount(last, weights, size)
        return np.cumsum(change)[: self._total]


_STEPS_PER_POINT = 8
"""Most decode steps per start or end for an array of steps."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of decode steps in which the same requests decode.

    times: Decode steps before each run and in total, ascending, shape (runs + 1,).
    active: Number of decoding slots, shape (runs,).
    kv_tokens: Mean tokens of KV cache held in a step, shape (runs,).
    changed: True if a request starts or ends at the run's beginning, shape (runs,).
    """

    times: IntArray
    active: IntArray
    kv_tokens: FloatArray
    changed: npt.NDArray[np.bool_]

    def seconds(self, cost: CostModel) -> FloatArray:
        return np.diff(self.times) * cost.decode_seconds(self.active, self.kv_tokens)

    def at(self, steps: IntArray) -> IntArray:
        """Return the run that begins at each given step."""
        return np.searchsorted(self.times, steps)


def _starts(decode_steps: IntArray) -> IntArray:
    return np.append(0, np.cumsum(decode_steps))
