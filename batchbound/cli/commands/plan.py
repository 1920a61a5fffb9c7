"""``batchbound plan``: make a checked schedule with a lower bound."""

from __future__ import annotations

import argparse
import json
import time

from ...data.files.disk import InputError
from ...data.files.outputs import can_be_made_again, refuse_outputs
from ...data.plan import Plan
from ...judging import calibration_of
from ...models.formulations.full_model import UnsupportedProblemError
from ...planning.plan import PlanningError
from ...solvers.backends.linear import BackendError
from ...solvers.result import Limits, StoppedBy
from ...solvers.search.core.compiled import compiled_core
from ...solvers.search.stages.rounding import can_round
from ...solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, SOLVERS
from .. import INTERRUPTED
from ..inputs import (
    Inputs,
    add_problem,
    named_files,
    positive,
    provenance_of,
    random_seed,
    read_inputs,
    seconds,
)
from ..interrupts import terminating
from ..iteration_plan import add_mixing, engine_files, plan_for_engine
from ..output import fail, note, plan_summary, seconds_basis, show
from ..parser import Parser
from ..plan_options import (
    DEFAULT_OUTPUT,
    add_fleet,
    add_rules,
    add_sweep,
    add_uncertainty,
    paid,
    planned,
    show_sweep,
    swept,
)
from ..progress import working
from ..streams import say


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_problem(parser, auto_slots=True)
    add_uncertainty(parser)
    add_fleet(parser)
    group = parser.add_argument_group("solver")
    group.add_argument(
        "--solver",
        choices=sorted(SOLVERS),
        default=DEFAULT_SOLVER,
        help="solver that makes the schedule (default %(default)s)",
    )
    group.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help=f"search time in seconds (default {DEFAULT_SECONDS:g}, none with --work)",
    )
    group.add_argument(
        "--work",
        type=positive,
        metavar="N",
        help="search limit in steps; unlike a time limit, it gives the same schedule for the same seed",
    )
    group.add_argument(
        "--seed",
        type=random_seed,
        default=0,
        help="seed of the search's random choices (default %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=positive,
        default=1,
        help="threads of an external solver (default %(default)s)",
    )
    group.add_argument("--params", metavar="FILE", help="TOML file of search parameters: phases and shares")
    add_sweep(parser)
    add_mixing(parser)
    parser.add_argument(
        "-o",
        "--output",
        default=DEFAULT_OUTPUT,
        metavar="FILE",
        everyday=True,
        help="file of the plan (default %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", everyday=True, help="replace the output if it exists"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_rules(parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan, write it, and print its summary."""
    begun = time.perf_counter()
    if args.sweep is None:
        if not args.overwrite and args.engine is None and can_be_made_again(args.output):
            note(f"{args.output}: replacing the earlier plan")
            args.overwrite = True
        refuse_outputs([args.output, *engine_files(args)], args.overwrite, named_files(args, "output"))
    if args.engine is not None:
        return plan_for_engine(args, _limits(args), begun)
    with working(f"reading {args.workload}"):
        inputs = read_inputs(args, keep_arrivals=False)
    if inputs.job.workload.arrival.any():
        note("arrival times are ignored: a plan has every request at the start")
    if args.tokenizer is None and args.model is None and inputs.job.records:
        note("such a plan runs on no model with a tokenizer of its own: plan with --model MODEL to run it")
    limits = _limits(args)
    _note_missing(args.solver)
    if args.sweep is not None:
        return _sweep(args, inputs, limits)
    try:
        with working(f"planning {len(inputs.problem):,} requests"), terminating():
            plan = planned(args, inputs, limits, provenance_of(inputs, args.output))
    except PlanningError as error:
        return fail(str(error))
    except (BackendError, UnsupportedProblemError) as error:
        hint = f"The default, {DEFAULT_SOLVER}, takes every job."
        raise InputError(str(error), where=f"--solver {args.solver}", hint=hint) from None
    plan.save(args.output)
    replicas = len(plan.fleet.replicas)
    summary = plan_summary(plan, time.perf_counter() - begun) | paid(replicas, plan.seconds, args.price)
    _note_limitations(plan)
    title = f"{args.output}: {_what(plan)}, {seconds_basis(plan.provenance.cost_source)}"
    show(summary, as_json=args.json, title=title)
    if plan.maker.stopped_by != StoppedBy.INTERRUPT:
        return 0
    note(f"interrupted: {args.output} holds the best plan found until then")
    return INTERRUPTED


def _note_missing(solver: str) -> None:
    if solver != DEFAULT_SOLVER:
        return
    if not can_round():
        note("OR-Tools is not installed: the search does not round flows (pip install 'batchbound[solvers]')")


def _sweep(args: argparse.Namespace, inputs: Inputs, limits: Limits) -> int:
    try:
        with working(f"planning {len(inputs.problem):,} requests"):
            rows = swept(args, inputs, limits)
    except PlanningError as error:
        return fail(str(error))
    if args.json:
        say(json.dumps({"sweep": rows}))
        return 0
    say(f"{len(inputs.problem):,} requests, {seconds_basis(inputs.cost_source)}")
    show_sweep(rows)
    return 0


def _limits(args: argparse.Namespace) -> Limits:
    seconds = DEFAULT_SECONDS if args.work is None and args.time_limit is None else args.time_limit
    return Limits(seconds=seconds, work=args.work, threads=args.threads, seed=args.seed)


def _note_limitations(plan: Plan) -> None:
    """Note a missing compiled search, a solver's message and extrapolated costs."""
    if plan.maker.solver == DEFAULT_SOLVER and compiled_core() is None:
        note("no compiled search is installed: install a C++ compiler, then batchbound again")
    if plan.followed is not None:
        note(
            f"the plan follows {plan.followed.policy}, which evicts {plan.followed.evictions:,} requests and"
            f" takes {plan.seconds:,.3f} s; the best schedule found without evictions takes"
            f" {plan.makespan:,.3f} s"
        )
    if plan.maker.message:
        note(f"{plan.maker.solver}: {plan.maker.message}")
    for place in _beyond(plan):
        note(f"the cost model extrapolates: {place}; `batchbound profile` measures it")


def _beyond(plan: Plan) -> tuple[str, ...]:
    """Return the ways in which a plan leaves the measured grid."""
    calibrated, fleet = calibration_of(plan), plan.fleet
    if calibrated is None:
        return ()
    held = int(fleet.kv_token_steps.sum()) / max(1, int(fleet.decode_steps.sum()))
    slots = max(replica.slots for replica in fleet.replicas)
    return calibrated.beyond(slots, int(plan.workload.input_tokens.max()), held)


def _what(plan: Plan) -> str:
    replicas = plan.fleet.replicas
    machines = f"{len(replicas):,} replicas" if len(replicas) > 1 else f"{replicas[0].slots:,} slots"
    return f"{len(plan.workload):,} requests on {machines}"
