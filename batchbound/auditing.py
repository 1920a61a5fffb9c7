"""Audit of a server's run: the bound, and the loss by cause."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .data.arrays import FloatArray, IntArray
from .data.claims.assumptions import (
    COLD_CACHE,
    DISTINCT,
    NO_EVICTION,
    ONE_TOKEN,
    WHOLE_CONTEXT,
    Assumption,
    assumed_line,
    broken_line,
    least_label,
    stated_limits,
)
from .data.costs.communication import with_all_reduce
from .data.costs.iteration_rates import IterationRates
from .data.costs.link import usual_link
from .data.files.disk import InputError, read_text
from .data.files.kinds import refuse_other_kinds
from .data.files.shown import Shown
from .data.iterations import UNLIMITED, EngineLimits, Sequences
from .data.readers.completions import Endings
from .data.readers.iteration_log import is_iteration_log, read_iteration_log
from .data.readers.measured_run import MeasuredRun, read_vllm_run
from .data.readers.profile_readers import read_profile
from .data.readers.server_run import ServerRun, is_timed, read_timed_requests
from .data.readers.tables import read_lengths
from .executor.reports.audit_page import Losses, Occupancy, save_audit_page
from .executor.reports.cache_picture import CachePicture
from .executor.reports.iteration_audit import (
    WORK,
    IterationAudit,
    audit_iterations,
    audit_log,
    order_audit,
    orders_of,
)
from .executor.reports.prompt_audit import PromptAudit, cache_picture
from .executor.reports.run_assumptions import kinds_under
from .heuristics.iterations.fitted_audit import estimate_seconds, simulated_orders
from .heuristics.iterations.iteration_fit import LARGEST_ERROR, IterationFit, PricedRun, TimedJob, fit_log
from .heuristics.iterations.seconds_audit import MODEL, audit_seconds
from .listening import note
from .models.certificates.iterations import verify_iteration_seconds, verify_iterations
from .models.iterations.layer_cost import LayerCost
from .options.judging import AuditOptions
from .options.option import takes
from .run_job.beginnings import fitted_rates

if TYPE_CHECKING:
    import pandas as pd

_BUDGET = 2048
"""Simulated tokens per iteration if unknown: vLLM's default on most devices."""

_ROUNDED = 1e-9
"""Fraction of the measured seconds that counts as rounding."""

_STANDS = {"longest first": "best order found"}
"""Names of simulated orders on a prefix cache, where they differ."""

_NO_COST = "no seconds: the iterations do not fit a linear cost"


@dataclass(frozen=True, slots=True, repr=False)
class Audit(Shown):
    """Bound of a server's run, and its loss by cause.

    tables: Figures by title and name.
    assumptions: Assumptions of the figures, and reasons for missing figures.
    losses: Losses in the picture, an entry per unit.
    runs: Running requests over time, in the run and in other orders.
    clock: Unit of the clock of ``runs``.
    rates: Linear cost of an iteration, fitted to the run; None without a fit.
    claims: Assumptions of the bound on iterations, each with its basis.
    is_defect: True if the run beats the bound although all assumptions were checked.
    cache: Picture of the shared beginnings in the server's KV cache; None without any.
    """

    tables: Mapping[str, Mapping[str, object]]
    assumptions: tuple[str, ...] = ()
    losses: tuple[Losses, ...] = ()
    runs: tuple[Occupancy, ...] = ()
    clock: str = "iterations"
    rates: IterationRates | None = None
    claims: tuple[Assumption, ...] = ()
    is_defect: bool = False
    cache: CachePicture | None = None

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield the figures of the first tables and the assumptions."""
        yield "Audit", f"{len(self.tables)} tables, {len(self.assumptions)} assumptions"
        for title, table in self.tables.items():
            for name, value in table.items():
                if isinstance(value, str | int | float):
                    yield f"{title}: {name}", f"{value:,.4g}" if isinstance(value, float) else value
        for assumption in self.assumptions:
            yield "assuming", assumption

    def to_frame(self) -> pd.DataFrame:
        """Return the figures as a data frame: table, name, value."""
        import pandas as pd

        rows = [(title, name, value) for title, table in self.tables.items() for name, value in table.items()]
        return pd.DataFrame(rows, columns=["table", "name", "value"])

    def save_html(self, path: str | os.PathLike[str], title: str) -> None:
        """Write the audit to ``path`` as a page for a browser."""
        save_audit_page(path, title, self.losses, self.runs, self.tables, clock=self.clock, cache=self.cache)


@takes(AuditOptions)
def audit(options: AuditOptions) -> Audit:
    """Bound a server run's iterations, and split its loss by cause.

    It takes the options of ``batchbound audit`` as keywords. Without a ``profile``, seconds are estimates,
    with their error, from a linear cost fitted to the run.

    Raises
    ------
    InputError
        If the run cannot be read, or an option has no effect on a run of its kind.
    """
    options.check_outputs("html", "save_cost")
    audited = _audited(options)
    if options.html is not None:
        audited.save_html(options.html, Path(options.run).name)
        note(f"wrote {options.html}: open it in a browser")
    if options.save_cost is not None:
        if audited.rates is None:
            hint = "Leave out --save-cost" + (" or --profile." if options.profile else ".")
            raise InputError("no cost of an iteration was fitted", file=options.run, hint=hint)
        audited.rates.save(options.save_cost)
        cost = options.save_cost
        note(f"wrote {cost}: plan with `batchbound plan FILE --for ENGINE --cost {cost}`")
    return audited


def _audited(options: AuditOptions) -> Audit:
    refuse_other_kinds(options.run, "no run of a server", {"batchbound_server_run"})
    if Path(options.run).is_dir():
        if options.iterations is not None:
            raise _only_for("--iterations", "a log of iterations", options)
        return _measured(options)
    if options.profile is not None:
        raise _only_for("--profile", "a measured vLLM run", options)
    text = read_text(options.run)
    if is_iteration_log(text):
        return _log(options)
    if options.iterations is not None:
        raise _only_for("--iterations", "a log of iterations", options)
    if "batchbound_server_run" in text.partition("\n")[0]:
        return _server_run(options)
    if is_timed(text):
        return _timed(options)
    return _lengths(options)


def _only_for(option: str, kind: str, options: AuditOptions) -> InputError:
    return InputError(f"{option} is for {kind}", file=options.run, hint="Leave it out.")


def _limits(
    options: AuditOptions, sequences: int, batched: int, kv_tokens: int | None, block: int
) -> EngineLimits:
    """Return the server's limits; raise InputError if they are impossible."""
    if options.block_tokens is not None and kv_tokens is None:
        what = "--block-tokens has no effect without a KV capacity"
        raise InputError(what, file=options.run, hint="Add --kv-tokens, or leave it out.")
    try:
        return EngineLimits(sequences, batched, kv_tokens, block)
    except ValueError as error:
        hint = "Correct --kv-tokens or --block-tokens."
        raise InputError(str(error), file=options.run, hint=hint) from None


def _stated(options: AuditOptions, silent: str) -> EngineLimits:
    if options.slots is None:
        raise InputError(f"{silent} not say the slots", file=options.run, hint="Add --slots N.")
    budget, block = options.batched_tokens or _BUDGET, options.block_tokens or 16
    return _limits(options, options.slots, budget, options.kv_tokens, block)


def _proven(options: AuditOptions, limits: EngineLimits) -> EngineLimits:
    """Return the limits that the bound relies on; others are infinite."""
    return replace(
        limits,
        batched_tokens=UNLIMITED if options.batched_tokens is None else limits.batched_tokens,
        block_tokens=1 if options.block_tokens is None else limits.block_tokens,
    )


def _server_run(options: AuditOptions) -> Audit:
    ran = ServerRun.load(options.run)
    count, engines = len(ran.servers), sum(server.engines or 1 for server in ran.servers)
    room = [server.kv_tokens for server in ran.servers if server.kv_tokens is not None]
    blocks = {server.block_tokens for server in ran.servers} - {None}
    limits = _limits(
        options,
        (options.slots or ran.slots) * count,
        (options.batched_tokens or _BUDGET) * engines,
        options.kv_tokens or (sum(room) if len(room) == count else None),
        options.block_tokens or (next(iter(blocks)) or 16 if len(blocks) == 1 else 1),
    )
    shares = ran.tree is not None and len(ran.tree.parent) > 0
    rates = fitted_rates(ran, limits) if shares else None
    try:
        known_budget, known_kv = options.batched_tokens is not None, options.kv_tokens is not None
        found = audit_iterations(ran, limits, budget_known=known_budget, kv_stated=known_kv, rates=rates)
    except ValueError as error:
        raise InputError(str(error), file=options.run, hint="Nothing can be audited.") from None
    _confirm(verify_iterations(found.sequences, found.limits, found.bound, found.drafts))
    # Other clients explain the distance, too.
    far = None if found.broken or ran.counted_beside else found.far
    if far is not None:
        prompts = None if found.prompts is None else replace(found.prompts, runs={})
        found = replace(found, simulated={}, prompts=prompts)
    tables, lost, remarks = _counted(found)
    told = (ran.only_part, ran.counted_beside, far, *ran.other_slots(options.slots or ran.slots))
    remarks = (*remarks, *(line for line in told if line is not None))
    endings = Endings.of(ran.endings)
    if endings is not None and endings.line is not None:
        alone = f"; the same run with {endings.retry} sends these alone" if endings.retry else ""
        remarks = (*remarks, endings.line + alone)
    no_seconds = engines > 1 or found.broken or found.drafts != 0 or ran.abandoned
    if engines > 1:
        remarks = (*remarks, "no seconds: they are fitted to one engine, and there are several")
    elif found.broken or found.drafts != 0:
        remarks = (*remarks, "no seconds: an assumption of their bound is broken")
    cache = None if options.html is None else cache_picture(ran, limits)
    if no_seconds:
        claims, defect = found.assumptions, found.is_defect
        return Audit(tables, remarks, lost, claims=claims, is_defect=defect, cache=cache)
    if shares or any(assumption.name == DISTINCT for assumption in ran.assumptions):
        tables, why = _cached_seconds(tables, ran, found.prompts, rates)
        claims, defect = found.assumptions, found.is_defect
        return Audit(tables, (*remarks, why), lost, rates=rates, claims=claims, is_defect=defect, cache=cache)
    done = np.flatnonzero(ran.failed == 0)
    request = np.repeat(np.arange(len(done)), ran.choices[done])
    job = TimedJob(found.sequences, request, ran.sent[done], ran.finished[done])
    known = replace(limits, sequences=found.limits.sequences)
    in_file = np.argsort(np.repeat(ran.position[done], ran.choices[done]), kind="stable")
    audit = _with_seconds(tables, job, known, found.limits, {"file order": in_file})
    remarks = (*remarks, *audit.assumptions)
    lost = (*lost, *audit.losses)
    return replace(audit, losses=lost, assumptions=remarks, claims=found.assumptions, cache=cache)


def _cached_seconds(
    tables: Mapping[str, Mapping[str, object]],
    ran: ServerRun,
    prompts: PromptAudit | None,
    rates: IterationRates | None,
) -> tuple[dict[str, Mapping[str, object]], str]:
    """Add estimated seconds of the simulated orders on a prefix cache; return a remark on them."""
    if rates is None or prompts is None or not prompts.runs:
        return dict(tables), "no seconds: no linear cost of an iteration fits this run on its prefix cache"
    seconds: dict[str, object] = {"measured": ran.makespan, "error of the estimate (share)": rates.error}
    seconds |= {
        f"simulated, {_STANDS.get(name, name)}": run.seconds(rates) for name, run in prompts.runs.items()
    }
    fitted = {
        "each": rates.iterations,
        "and a decode": rates.decodes,
        "and a prompt token computed": rates.prompt_tokens,
        "and a token of KV cache read": rates.kv_tokens,
    }
    shown = {**tables, "seconds": seconds, "seconds of an iteration, fitted": fitted}
    return shown, f"seconds are estimated on the prefix cache, with an error of {rates.error or 0.0:.0%}"


def _counted(
    found: IterationAudit,
) -> tuple[dict[str, Mapping[str, object]], tuple[Losses, ...], tuple[str, ...]]:
    lines = (broken_line(found.assumptions), assumed_line(found.assumptions), found.broken)
    remarks = tuple(line for line in lines if line is not None)
    tables: dict[str, Mapping[str, object]] = {
        "iterations": {
            "counted by the server": found.counted,
            f"{found.label}, by {found.bound.source}": found.bound.iterations,
            **{f"lost: {name}": value for name, value in found.losses.items()},
        },
        "by the order of the requests (simulated)": {
            name: one.iterations for name, one in found.simulated.items()
        },
        **_of_prompts(found.prompts),
        "certificate": dict(found.bound.certificate),
    }
    tables = {title: table for title, table in tables.items() if table}
    if found.counted is None or found.broken:
        return tables, (), remarks
    parts = {name: float(value) for name, value in found.losses.items()}
    lost = Losses("iterations", found.counted, found.bound.iterations, parts, found.label)
    return tables, (lost,), remarks


def _of_prompts(prompts: PromptAudit | None) -> dict[str, Mapping[str, object]]:
    """Return the table of prompt tokens against the tree of shared beginnings."""
    if prompts is None:
        return {}
    warm = prompts.computed is not None and prompts.computed < prompts.needed
    table = {
        "computed by the server": prompts.computed,
        "needed from an empty cache" if warm else "needed": prompts.needed,
        "computed again after eviction": prompts.again,
        **{f"simulated, {_STANDS.get(name, name)}": run.prompt_tokens for name, run in prompts.runs.items()},
    }
    return {"prompt tokens": {name: tokens for name, tokens in table.items() if tokens is not None}}


def _with_seconds(
    tables: Mapping[str, Mapping[str, object]],
    job: TimedJob,
    limits: EngineLimits,
    proven: EngineLimits,
    orders: Mapping[str, IntArray] = MappingProxyType({}),
) -> Audit:
    """Return an audit with estimated seconds of the usual orders and of ``orders``."""
    found = estimate_seconds(job, limits, proven, {**orders_of(job.sequences), **orders})
    if found is None:
        return Audit(tables, ("no seconds: the job is too large to simulate",))
    error, rates = found.fit.error, _rates(found.fit)
    if error is None:
        why = f"the times are too few, or all equal, to fit and test a cost ({found.fit.marks} times)"
        return Audit(tables, (f"no seconds: {why}",), rates=rates)
    far = abs(found.simulated - found.measured) > LARGEST_ERROR * found.measured
    if far or not found.fit.is_linear or found.least > found.measured * (1.0 + _ROUNDED):
        return Audit(tables, (_NO_COST,))
    seconds: dict[str, object] = {
        "measured": found.measured,
        "least, estimated": found.least,
        "error of the estimate (share)": error,
        **{
            f"simulated, all there at the start, {name}": float(run.run.finished.max())
            for name, run in found.orders.items()
        },
    }
    remarks = (
        f"seconds are estimated: a linear cost, fitted to the job's own times with an error of {error:.0%}"
    )
    runs = [_running("the run", job.start if job.first is None else job.first, job.last)]
    # The run itself is drawn, so its order is not simulated in the picture.
    sent = "as sent" if job.first is not None else None
    runs += _simulated({name: run for name, run in found.orders.items() if name != sent})
    shown = {**tables, "seconds": seconds, **_fitted(found.fit)}
    drawn = tuple(runs if job.first is not None else runs[1:])
    return Audit(shown, (remarks,), (), drawn, "seconds", rates)


def _simulated(orders: Mapping[str, PricedRun]) -> tuple[Occupancy, ...]:
    """Return the running requests over time in each simulated order."""
    return tuple(
        Occupancy(f"{name}, simulated", run.run.start + run.run.seconds, run.under_way)
        for name, run in orders.items()
        if name != "shortest first"
    )


def _running(name: str, begin: FloatArray, end: FloatArray) -> Occupancy:
    times = np.concatenate((begin, end))
    change = np.repeat([1.0, -1.0], len(begin))
    order = np.argsort(times, kind="stable")
    count = np.cumsum(change[order])
    return Occupancy(name, times[order][1:] - times.min(), count[:-1])


def _fitted(fit: IterationFit) -> dict[str, Mapping[str, object]]:
    rates = fit.rates
    return {
        "seconds of an iteration, fitted": {
            "each": rates.iterations,
            "and a decode": rates.decodes,
            "and a prompt token": rates.prompt_tokens,
            "and a token of KV cache read": rates.kv_tokens,
            "error on parts of the run left out of the fit (share)": fit.error,
            "times compared": fit.marks,
        }
    }


def _rates(fit: IterationFit) -> IterationRates | None:
    rates = fit.rates.rates
    return IterationRates(**rates, source="fitted to a run", error=fit.error) if any(rates.values()) else None


def _log(options: AuditOptions) -> Audit:
    stated = ("batched_tokens", "kv_tokens", "block_tokens")
    options.refuse(stated, "on a log of iterations", file=options.run)
    log = read_iteration_log(options.run, options.iterations)
    sequences = options.slots or log.sequences
    if sequences is None:
        raise InputError("does not say max_num_seqs", file=options.run, hint="Add --slots N.")
    try:
        found = audit_log(log, int(sequences))
    except ValueError as error:
        raise InputError(str(error), file=options.run, hint="Correct --slots.") from None
    fit = fit_log(log)
    tables: dict[str, Mapping[str, object]] = {
        f"iterations ({found.sequences} slots)": {"counted": found.counted, **found.parts},
        "seconds of the engine": dict(found.seconds),
        **(_fitted(fit) if fit.is_linear else {}),
    }
    lost = {name: value for name, value in found.parts.items() if name != WORK}
    parts = Losses("iterations", found.counted, found.parts[WORK], lost, WORK)
    ran = Occupancy("the run", np.arange(1.0, len(log) + 1), (log.chunks + log.decodes).astype(np.float64))
    assumptions = () if fit.is_linear else (_NO_COST.replace("seconds", "seconds of an iteration"),)
    rates = _rates(fit) if fit.is_linear else None
    return Audit(tables, assumptions, losses=(parts,), runs=(ran,), rates=rates)


def _timed(options: AuditOptions) -> Audit:
    ran = read_timed_requests(options.run)
    limits = _stated(options, "times of requests do")
    sequences, proven = Sequences(ran.prompt, ran.output), _proven(options, limits)
    job = TimedJob(sequences, np.arange(len(sequences)), ran.start, ran.last, ran.first)
    audit = _by_order(sequences, limits, proven, _unseen(proven))
    timed = _with_seconds(audit.tables, job, limits, proven)
    return replace(timed, assumptions=(*audit.assumptions, *timed.assumptions), claims=audit.claims)


def _lengths(options: AuditOptions) -> Audit:
    work = read_lengths(options.run)
    limits = _stated(options, "a table of lengths does")
    sequences = Sequences(work.input_tokens, work.output_tokens)
    proven = _proven(options, limits)
    audit = _by_order(sequences, limits, proven, _unseen(proven))
    return replace(audit, runs=_simulated(simulated_orders(sequences, limits, orders_of(sequences))))


def _unseen(limits: EngineLimits) -> tuple[Assumption, ...]:
    return stated_limits(limits, Assumption(DISTINCT, "assumed"))


def _measured(options: AuditOptions) -> Audit:
    ran = read_vllm_run(options.run)
    limits = _limits(
        options,
        options.slots or ran.sequences,
        options.batched_tokens or ran.batched_tokens,
        options.kv_tokens or ran.kv_capacity,
        options.block_tokens or ran.block_tokens,
    )
    assumed = []
    if limits.kv_tokens is None:
        assumed.append("assumed: the KV cache is unlimited, as the run does not state its tokens")
    known = [Assumption(ONE_TOKEN, "checked", "the run's options name no drafts")]
    if ran.reuse:
        known.append(Assumption(DISTINCT, "assumed"))
    else:
        known.append(Assumption(COLD_CACHE, "checked", "the run's options keep no prompts"))
    if options.kv_tokens is None:
        known += [Assumption(name, "assumed") for name in (WHOLE_CONTEXT, NO_EVICTION)]
    claims = stated_limits(limits, *known)
    work = ran.workload
    order = np.argsort(work.arrival, kind="stable")
    sequences = Sequences(work.input_tokens[order], work.output_tokens[order])
    audit = _by_order(sequences, limits, limits, claims)
    assumed.extend(audit.assumptions)
    tables = audit.tables
    if options.profile is not None:
        found = _in_seconds(ran, limits, options.profile, claims)
        spans = _running("the run", ran.first_token, ran.finished)
        remarks = (*assumed, *found.assumptions)
        tables = {**tables, **found.tables}
        return replace(found, tables=tables, assumptions=remarks, runs=(spans,), claims=audit.claims)
    if ran.data_parallel > 1:
        why = "no seconds: they are fitted to one replica, and there are several"
        return replace(audit, assumptions=(*assumed, why))
    job = TimedJob(
        sequences, np.arange(len(order)), work.arrival[order], ran.finished[order], ran.first_token[order]
    )
    timed = _with_seconds(tables, job, limits, limits)
    return replace(timed, assumptions=(*assumed, *timed.assumptions), claims=audit.claims)


def _in_seconds(
    ran: MeasuredRun,
    limits: EngineLimits,
    profile: str | os.PathLike[str],
    claims: tuple[Assumption, ...],
) -> Audit:
    """Price the bound and the losses by a layer profile."""
    ran = replace(
        ran,
        sequences=limits.sequences,
        batched_tokens=limits.batched_tokens,
        kv_capacity=limits.kv_tokens,
        block_tokens=limits.block_tokens,
    )
    table = read_profile(profile)
    link = usual_link(table.device)
    if ran.data_parallel > 1 or (link is None and table.tensor_parallel > 1):
        what = "an audit in seconds needs a single replica, and a known link between its devices"
        raise InputError(what, file=profile, hint="Leave the profile out.")
    try:
        cost = LayerCost(table if link is None else with_all_reduce(table, link))
        found = audit_seconds(ran, cost, kinds_under(claims, limits))
    except ValueError as error:
        raise InputError(str(error), file=profile, hint="Give another profile, or leave it out.") from None
    work, rates = ran.workload, found.minorant.rates
    sequences = Sequences(work.input_tokens, work.output_tokens)
    _confirm(
        verify_iteration_seconds(sequences, limits, found.iterations, rates, found.bound, resumed_known=True)
    )
    holds = found.bound <= found.measured * (1.0 + _ROUNDED)
    small = _ROUNDED * found.measured
    losses = {name: 0.0 if abs(value) <= small else value for name, value in found.losses.items() if holds}
    label = least_label(claims, "seconds", found.iterations.certificate.get("kind"))
    tables: dict[str, Mapping[str, object]] = {
        "seconds, at the profile's prices": {
            "measured": found.measured,
            "simulated": found.simulated,
            label if holds else "bound that the run broke": found.bound,
            **dict(_shown(name, value) for name, value in losses.items()),
        },
        "least seconds of an iteration": {
            name: f"{value:.4g}" for name, value in asdict(found.minorant).items()
        },
    }
    if not holds:
        why = "the run took fewer seconds than its bound: the profile is of a slower device or setting"
        return Audit(tables, (why,), clock="seconds")
    lost = Losses("seconds", found.measured, found.bound, losses, label)
    return Audit(tables, losses=(lost,), clock="seconds")


def _shown(name: str, value: float) -> tuple[str, float]:
    """Return the row of a loss, never negative for the model's excess."""
    return ("cost model above measured", -value) if name == MODEL and value < 0 else (f"lost: {name}", value)


def _by_order(
    sequences: Sequences, limits: EngineLimits, proven: EngineLimits, assumptions: tuple[Assumption, ...]
) -> Audit:
    found = order_audit(sequences, limits, proven, assumptions)
    _confirm(verify_iterations(found.sequences, found.limits, found.bound))
    tables: dict[str, Mapping[str, object]] = {
        "iterations, all requests there at the start": {
            f"{found.label}, by {found.bound.source}": found.bound.iterations,
            **{f"simulated, {name}": one.iterations for name, one in found.simulated.items()},
        },
        "evictions (simulated)": {name: one.preemptions for name, one in found.simulated.items()},
        "certificate": dict(found.bound.certificate),
    }
    assumed = assumed_line(found.assumptions)
    return Audit(tables, () if assumed is None else (assumed,), claims=found.assumptions)


def _confirm(violation: object) -> None:
    if violation is not None:
        raise RuntimeError(f"the bound fails its check: {violation}")
