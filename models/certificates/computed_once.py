"""Check of the bound of a run whose engine computed shared beginnings once."""

from __future__ import annotations

import numpy as np

from ...data.bound import Bound
from ...data.problem import Problem
from ...data.schedule import Violation
from ...data.workload import Workload
from .checker import verify_bound


def verify_counted_bound(problem: Problem, tokens: int, bound: Bound) -> Violation | None:
    """Return an error in a bound of stages that compute so many prompt tokens in all, or None.

    Stages cost least if their tokens are spread evenly, so the counts are checked with prompts that are.
    """
    certificate = bound.certificate
    counts, stated = certificate.get("counts"), certificate.get("prompt_tokens")
    if stated != tokens or not isinstance(counts, dict):
        return Violation("the tokens are those of the run", f"the certificate says {stated!r}, not {tokens}")
    reads = problem.cost.decode_per_kv_token * problem.kv_token_steps
    if bound.terms.get("KV reads") != reads:
        return Violation("reads are counted", f"{bound.terms.get('KV reads')!r} s, not {reads!r} s")
    prompts = [tokens // len(problem) + (row < tokens % len(problem)) for row in range(len(problem))]
    even = Problem(
        Workload(problem.workload.ids, np.array(prompts), problem.workload.output_tokens),
        problem.cost,
        problem.slots,
        prefill_emits_first_token=problem.prefill_emits_first_token,
    )
    # Prompts that are spread evenly read other tokens.
    other_terms = {name: seconds for name, seconds in bound.terms.items() if name != "KV reads"}
    read = problem.cost.decode_per_kv_token * even.kv_token_steps
    terms = other_terms | ({"KV reads": read} if read else {})
    source = bound.source.removesuffix(", common beginnings once")
    return verify_bound(even, Bound(sum(terms.values()), source, terms, counts))
