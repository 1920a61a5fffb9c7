"""Bound of schedules that may evict requests."""

from __future__ import annotations

from dataclasses import replace

from ...data.bound import Bound
from ...data.problem import Problem
from .argument import Known
from .least_counts import least_counts
from .params import EVICTING

SOURCE = "fewest stages and decode steps, evictions allowed"


def evicting_bound(problem: Problem) -> Bound:
    """Bound every schedule, with or without evictions.

    An evicted request keeps its completion, and its later prefill computes prompt and completion again. So
    these hold as without evictions:

    - **slots by memory**: a running request holds its prompt at least;
    - **stages**: each request has a first prefill, and those of a stage are as many as slots at most, and fit
      the token cap and the KV capacity;
    - **decode steps**: those of one request follow one another, and a step serves each slot once and reads no
      more tokens than the KV capacity. A request reads the same tokens in its n-th step, evicted or not;
    - **seconds**: those of a stage do not fall with the tokens that it computes again.

    Two requests, lifting and all curves over the number of stages need one interval a request, so none of
    them is used. Arrival times are left out, which only lowers the bound.
    """
    bound = Known.of(problem, least_counts(problem, EVICTING)).bound()
    return replace(bound, source=SOURCE, certificate={**bound.certificate, "evictions": True})
