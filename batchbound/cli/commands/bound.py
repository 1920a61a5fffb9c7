"""``batchbound bound``: lower bounds of a workload."""

from __future__ import annotations

import argparse
import json

from ...data.bound import Bound
from ...data.files.record import plain
from ...data.problem import Problem
from ...models.bounds.difference_set import difference_set_bound
from ...models.bounds.makespan import paper_bound, trivial_bound
from ...models.bounds.packing.partition import solve_partition
from ...models.bounds.prove import proven_bound
from ..inputs import add_problem, read_inputs
from ..parser import Parser
from ..streams import say


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print JSON, certificates included"
    )


def run(args: argparse.Namespace) -> int:
    """Print every bound, the strongest first and the paper's formula last."""
    problem = read_inputs(args, keep_arrivals=False).problem
    valid = [trivial_bound(problem), difference_set_bound(problem), proven_bound(problem)]
    by_source = {bound.source: bound for bound in valid}
    bounds = [*sorted(by_source.values(), key=lambda bound: -bound.seconds), _printed(problem)]
    if args.json:
        say(json.dumps([plain(bound) for bound in bounds]))
        return 0
    for bound in bounds:
        doubt = "" if bound.valid else " (NOT a valid bound in general: for comparison only)"
        say(f"{bound.seconds:14.6f} s  {bound.source}{doubt}")
        for name, seconds in bound.terms.items():
            say(f"{seconds:14.6f} s    {name}")
    return 0


def _printed(problem: Problem) -> Bound:
    """Return the paper's formula for stages of the greatest length."""
    prompts = problem.prompt_tokens
    tokens = problem.prefill_token_cap or max(1, int(prompts.sum()) * problem.slots // len(prompts))
    packing = solve_partition(problem.decode_steps, problem.slots)
    return paper_bound(problem, [(tokens, problem.cost.prefill_seconds(tokens))], packing.makespan)
