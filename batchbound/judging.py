"""Plans judged: the report of a run, and a plan checked again without the solver that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .data.bound import Bound
from .data.costs.calibration import CalibratedCost
from .data.files.disk import InputError
from .data.files.record import record
from .data.fleet import Fleet
from .data.plan import Plan
from .data.report import Report
from .data.schedule import Violation
from .data.trace import Trace
from .executor.reports.report import plan_report, served_part
from .executor.reports.steady_state import reached
from .models.bounds.fleet import fleet_bound
from .models.certificates.fleet import verify_fleet_bound
from .solvers.bounds.proven_bound import proven_bound


def verify(plan: Plan) -> Violation | None:
    """
    Return what does not hold of a plan, or None if its schedule breaks no rule and its bound is proven.

    The bound is derived again from its certificate, by code that shares nothing with the solvers.
    """
    broken = plan.shares.check(plan.fleet, plan.groups)
    if broken is not None:
        return broken
    return None if plan.bound is None else verify_fleet_bound(plan.fleet, plan.bound)


def report(plan: Plan, traces: Sequence[Trace], *, seconds: float | None = None) -> Report:
    """
    Return the report of a run of a plan, its gap taken to the bound of the lengths that came out.

    Parameters
    ----------
    plan
        What was run.
    traces
        Of the run, one for each replica.
    seconds
        What the work behind the report took.

    Raises
    ------
    InputError
        If the traces are of another plan.
    """
    calibrated = calibration_of(plan)
    try:
        served = served_part(plan.fleet, traces)
        run_bound = None if served is None else _proven(served)
        fit = None if calibrated is None else calibrated.error
        found = plan_report(plan, traces, fit=fit, run_bound=run_bound)
    except ValueError as error:
        raise InputError(str(error), hint="Give the plan that was run.") from None
    configuration = plan.configuration
    came_of_it = (
        None if configuration is None or found.clock == "model" else reached(configuration, traces[0])
    )
    return replace(found, reached=came_of_it, seconds=seconds)


def _proven(fleet: Fleet) -> Bound:
    alone = len(fleet.replicas) == 1 and not fleet.replicas[0].busy
    return proven_bound(fleet.problem()) if alone else fleet_bound(fleet)


def calibration_of(plan: Plan) -> CalibratedCost | None:
    """Return the calibration behind a plan's cost model, or None if its costs were not measured by us."""
    if "cost" not in plan.provenance.cost_source:
        return None
    recorded = {name: value for name, value in plan.provenance.cost_source.items() if name != "name"}
    return record(CalibratedCost, recorded)
