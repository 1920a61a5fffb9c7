"""Jobs and schedules in the form of the compiled searches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from .compiled import MOST, Allowance, Found, Int32Array, Job, Parameters, call, pointer


class CompiledJob:
    """Requests with decode steps as C arrays.

    Other requests are added to schedules afterwards.

    problem: Problem; without its KV capacity if ``memory`` is false.
    """

    def __init__(self, problem: Problem, *, memory: bool) -> None:
        self.problem = problem
        self.members: IntArray = np.flatnonzero(problem.decode_steps > 0)
        held = problem.held_at_start[self.members]
        # Shared beginnings are left to the offer of a schedule.
        columns = (problem.decode_steps[self.members], problem.own_tokens[self.members], held)
        self._columns = tuple(np.ascontiguousarray(column, dtype=np.int32) for column in columns)
        self.job = job_of(
            problem,
            self._columns,
            slots=min(problem.slots, len(self.members)),  # more are never used
            kv_capacity=problem.kv_capacity if memory else None,
        )

    def search(self, name: str, parameters: Parameters, allowance: Allowance, schedule: Schedule) -> Found:
        """Run a search from a schedule."""
        starts = schedule.starts
        stage = schedule.bin_of[self.members]
        slot = np.unique(schedule.slot_of[self.members], return_inverse=True)[1]
        plan = (starts[stage], stage, slot)
        end = int((starts[stage] + self.problem.decode_steps[self.members]).max())
        return call(name, self.job, parameters, allowance, plan, end)

    def in_steps(self, seconds: float, schedule: Schedule) -> float:
        """Return a makespan in decode steps, without its constant part."""
        problem, cost = self.problem, self.problem.cost
        _, decode = schedule.stage_seconds(problem)
        fixed = float(decode.sum()) - cost.decode_base * len(decode)
        fixed += cost.prefill_per_token * problem.workload.computed_tokens
        return (seconds - fixed) / cost.decode_base

    def schedule(self, found: Found) -> Schedule | None:
        """Return the schedule of a search, or None."""
        if not np.isfinite(found.cost):
            return None
        problem, members = self.problem, self.members
        stages, stage = np.unique(found.stage, return_inverse=True)
        times = np.zeros(len(stages), dtype=np.int64)
        times[stage] = found.start
        end = int((found.start + problem.decode_steps[members]).max())
        if len(members) == len(problem):
            return Schedule.from_bins(problem, stage, np.diff(np.append(times, end)))
        bin_of = np.full(len(problem), -1, dtype=np.int64)
        bin_of[members] = stage
        times = np.append(times, _add_without_steps(problem, bin_of, times, end))
        return Schedule.from_bins(problem, bin_of, np.diff(np.append(times, end)))


def _add_without_steps(problem: Problem, bin_of: IntArray, times: IntArray, end: int) -> IntArray:
    """Add requests without decode steps to bins; return new bins' times.

    They have -1 in ``bin_of``.
    """
    decode_steps, prompts, kv_tokens = problem.decode_steps, problem.prompt_tokens, problem.kv_at_start
    placed = np.flatnonzero(bin_of >= 0)
    begins = times[bin_of[placed]]
    ends = begins + decode_steps[placed]
    slots, tokens, memory = [], [], []
    for k, time in enumerate(times.tolist()):
        runs = (bin_of[placed] < k) & (ends > time)
        joins = bin_of[placed] == k
        slots.append(problem.slots - int(runs.sum() + joins.sum()))
        tokens.append(int(prompts[placed[joins]].sum()))
        grown = kv_tokens[placed[runs]] + time - begins[runs]
        memory.append(int(grown.sum() + prompts[placed[joins]].sum()))
    cap, capacity = problem.prefill_token_cap, problem.kv_capacity
    first = 0
    waiting = np.flatnonzero(bin_of < 0)
    for request in waiting[np.argsort(-prompts[waiting], kind="stable")].tolist():
        more = int(prompts[request])
        k = first
        while k < len(slots) and not (
            slots[k] > 0
            and (cap is None or tokens[k] + more <= cap)
            and (capacity is None or memory[k] + more <= capacity)
        ):
            # Full bins are skipped once and for all.
            first += int(k == first and slots[k] <= 0)
            k += 1
        if k == len(slots):
            slots.append(problem.slots)
            tokens.append(0)
            memory.append(0)
        slots[k] -= 1
        tokens[k] += more
        memory[k] += more
        bin_of[request] = k
    return np.full(len(slots) - len(times), end, dtype=np.int64)


def job_of(problem: Problem, columns: Sequence[Int32Array], *, slots: int, kv_capacity: int | None) -> Job:
    """Return a problem's C structure, which refers to ``columns``.

    columns: Decode steps, own prompt tokens, and KV at the start.
    """
    cost = problem.cost
    return Job(
        len(columns[0]),
        slots,
        kv_capacity or 0,
        problem.prefill_token_cap or 0,
        *map(pointer, columns),
        cost.prefill_base,
        cost.prefill_floor,
        cost.prefill_per_token,
        cost.prefill_bend,
        cost.prefill_per_token_beyond,
        cost.decode_base,
    )


def countable(problem: Problem) -> bool:
    """Return whether the library can count all steps and tokens."""
    peak = int(problem.kv_peak.max()) * min(problem.slots, len(problem))
    return max(int(problem.decode_steps.sum()), problem.kv_capacity or 0, peak) <= MOST
