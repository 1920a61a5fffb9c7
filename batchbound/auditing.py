"""What a finished run of a server lost, by cause, against what is proven of any run of the same requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from .data.costs.communication import with_all_reduce
from .data.costs.link import DEVICE_LINKS, LINKS
from .data.files.disk import InputError, read_text
from .data.iterations import EngineLimits, Sequences
from .data.readers.iteration_log import is_iteration_log, read_iteration_log
from .data.readers.measured_run import MeasuredRun, read_vllm_run
from .data.readers.profile_readers import read_profile
from .data.readers.server_run import ServerRun, is_timed, read_timed_requests
from .data.readers.tables import read_lengths
from .executor.reports.iteration_audit import audit_iterations, order_audit
from .executor.reports.log_audit import audit_log
from .models.certificates.iterations import verify_iterations
from .models.exegpt.layer_cost import LayerCost

_BUDGET = 2048
"""Tokens of an iteration that the simulation takes where nobody says: vLLM's default on most devices."""


@dataclass(frozen=True, slots=True)
class Audit:
    """
    What a run lost.

    Parameters
    ----------
    tables
        By title, the figures by their names: iterations, seconds, requests put back, the bound's certificate.
    assumptions
        What the run does not say and was taken for granted.
    """

    tables: Mapping[str, Mapping[str, object]]
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where the run stands, and what the caller says of the server beyond it."""

    path: Path
    slots: int | None
    batched_tokens: int | None
    kv_tokens: int | None
    block_tokens: int | None


def audit(
    run: str | os.PathLike[str],
    *,
    slots: int | None = None,
    batched_tokens: int | None = None,
    kv_tokens: int | None = None,
    block_tokens: int | None = None,
    iterations: tuple[int, int] | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> Audit:
    """
    Return what a run lost beyond the fewest iterations that are proven to be needed.

    Parameters
    ----------
    run
        A trace of a run on servers; vLLM's output with ``--enable-logging-iteration-details``; the folder of
        a measured vLLM run; a CSV of ``id, prompt_tokens, completion_tokens, start, first, last``; the output
        of an OpenAI batch with vLLM's request metrics; or a table of lengths that came out.
    slots, batched_tokens, kv_tokens, block_tokens
        The server's limits: requests at a time, tokens of an iteration, tokens of the KV cache and of one of
        its blocks; what the run says if left out.
    iterations
        The first and the last of a log that holds several jobs, counted from 0; all if left out.
    profile
        Layer profile of a measured vLLM run's device: adds the bound and the losses in seconds.

    Raises
    ------
    InputError
        If the run cannot be read, or something is said that has no effect on a run of its kind.
    """
    path = Path(run)
    asked = _Asked(path, slots, batched_tokens, kv_tokens, block_tokens)
    if path.is_dir():
        if iterations is not None:
            raise InputError("--iterations is for a log of iterations", file=path, hint="Leave it out.")
        return _measured(asked, profile)
    if profile is not None:
        raise InputError("--profile is for a measured vLLM run", file=path, hint="Leave it out.")
    text = read_text(path)
    if is_iteration_log(text):
        return Audit(_log(asked, iterations))
    if iterations is not None:
        raise InputError("--iterations is for a log of iterations", file=path, hint="Leave it out.")
    if "batchbound_server_run" in text.partition("\n")[0]:
        return Audit(_server_run(asked))
    if is_timed(text):
        return _timed(asked)
    return Audit(_lengths(asked))


def _server_run(asked: _Asked) -> dict[str, Mapping[str, object]]:
    ran = ServerRun.load(asked.path)
    count = len(ran.servers)
    room = [server.kv_tokens for server in ran.servers if server.kv_tokens is not None]
    blocks = {server.block_tokens for server in ran.servers} - {None}
    limits = EngineLimits(
        sequences=(asked.slots or ran.slots) * count,
        batched_tokens=(asked.batched_tokens or _BUDGET) * count,
        kv_tokens=asked.kv_tokens or (sum(room) if len(room) == count else None),
        block_tokens=asked.block_tokens or (next(iter(blocks)) or 16 if len(blocks) == 1 else 1),
    )
    try:
        found = audit_iterations(ran, limits, budget_known=asked.batched_tokens is not None)
    except ValueError as error:
        raise InputError(str(error), file=asked.path, hint="Nothing can be audited.") from None
    _confirm(verify_iterations(found.sequences, found.limits, found.bound))
    return {
        "iterations": {
            "counted by the server": found.counted,
            f"proven least, by {found.bound.source}": found.bound.iterations,
            **{f"lost: {name}": value for name, value in found.losses.items()},
        },
        "by the order of the requests (simulated)": {
            name: one.iterations for name, one in found.simulated.items()
        },
        "certificate": dict(found.bound.certificate),
    }


def _log(asked: _Asked, iterations: tuple[int, int] | None) -> dict[str, Mapping[str, object]]:
    for option in ("batched_tokens", "kv_tokens", "block_tokens"):
        if getattr(asked, option) is not None:
            what = f"--{option.replace('_', '-')} has no effect on a log of iterations"
            raise InputError(what, file=asked.path, hint="Leave it out.")
    log = read_iteration_log(asked.path, iterations)
    sequences = asked.slots or log.sequences
    if sequences is None:
        raise InputError("does not say max_num_seqs", file=asked.path, hint="Say --slots.")
    try:
        found = audit_log(log, int(sequences))
    except ValueError as error:
        raise InputError(str(error), file=asked.path, hint="Correct --slots.") from None
    return {
        f"iterations ({found.sequences} slots)": {"counted": found.counted, **found.parts},
        "seconds of the engine": dict(found.seconds),
    }


def _timed(asked: _Asked) -> Audit:
    """Return what a run lost whose requests' times are known: seconds, at the median seconds of a token."""
    ran = read_timed_requests(asked.path)
    if asked.slots is None:
        raise InputError("times of requests do not say the slots", file=asked.path, hint="Say --slots.")
    limits = EngineLimits(
        asked.slots, asked.batched_tokens or _BUDGET, asked.kv_tokens, asked.block_tokens or 16
    )
    sequences, known = Sequences(ran.prompt, ran.output), asked.batched_tokens is not None
    tables = _by_order(sequences, limits, budget_known=known)
    each = ran.iteration_seconds
    found = order_audit(sequences, limits, budget_known=known)
    if each is None or not found.simulated:
        return Audit(tables)
    lost = {f"lost: {name}": value * each for name, value in found.losses.items()}
    least = found.bound.iterations * each
    seconds = {
        "measured": ran.makespan,
        "an iteration (median between two tokens)": each,
        "proven least at that rate": least,
        **lost,
        "lost: the rest (prompts, waiting, other users)": ran.makespan - least - sum(lost.values()),
    }
    said = "an iteration is taken to last as long as the median time between two tokens of a request"
    return Audit({**tables, "seconds": seconds}, (said,))


def _lengths(asked: _Asked) -> dict[str, Mapping[str, object]]:
    work = read_lengths(asked.path)
    if asked.slots is None:
        raise InputError("a table of lengths does not say the slots", file=asked.path, hint="Say --slots.")
    limits = EngineLimits(
        asked.slots, asked.batched_tokens or _BUDGET, asked.kv_tokens, asked.block_tokens or 16
    )
    return _by_order(
        Sequences(work.input_tokens, work.output_tokens),
        limits,
        budget_known=asked.batched_tokens is not None,
    )


def _measured(asked: _Asked, profile: str | os.PathLike[str] | None) -> Audit:
    ran = read_vllm_run(asked.path)
    limits = EngineLimits(
        asked.slots or ran.sequences,
        asked.batched_tokens or ran.batched_tokens,
        asked.kv_tokens or ran.kv_capacity,
        asked.block_tokens or ran.block_tokens,
    )
    assumed = []
    if limits.kv_tokens is None:
        assumed.append("the run does not say how many tokens its KV cache holds: taken as unlimited")
    if ran.reuse:
        assumed.append("prompts are taken to share no prefix: less is needed than is proven where they do")
    work = ran.workload
    order = np.argsort(work.arrival, kind="stable")
    sequences = Sequences(work.input_tokens[order], work.output_tokens[order])
    tables = _by_order(sequences, limits, budget_known=True)
    if profile is not None:
        tables |= _in_seconds(ran, limits, profile)
    return Audit(tables, tuple(assumed))


def _in_seconds(
    ran: MeasuredRun, limits: EngineLimits, profile: str | os.PathLike[str]
) -> dict[str, Mapping[str, object]]:
    from .executor.profiling.seconds_audit import audit_seconds

    ran = replace(
        ran,
        sequences=limits.sequences,
        batched_tokens=limits.batched_tokens,
        kv_capacity=limits.kv_tokens,
        block_tokens=limits.block_tokens,
    )
    table = read_profile(profile)
    link = LINKS.get(DEVICE_LINKS.get(table.device, ""))
    if ran.data_parallel > 1 or (link is None and table.tensor_parallel > 1):
        what = "seconds of several replicas, or of devices whose link is not known, cannot be audited"
        raise InputError(what, file=profile, hint="Leave the profile out.")
    try:
        found = audit_seconds(ran, LayerCost(table if link is None else with_all_reduce(table, link)))
    except ValueError as error:
        raise InputError(str(error), file=profile, hint="Give another profile, or leave it out.") from None
    return {
        "seconds, at the profile's prices": {
            "measured": found.measured,
            "simulated": found.simulated,
            "proven least": found.bound,
            **{f"lost: {name}": value for name, value in found.losses.items()},
        },
        "least seconds of an iteration": {
            name: f"{value:.4g}" for name, value in asdict(found.minorant).items()
        },
    }


def _by_order(
    sequences: Sequences, limits: EngineLimits, *, budget_known: bool
) -> dict[str, Mapping[str, object]]:
    found = order_audit(sequences, limits, budget_known=budget_known)
    _confirm(verify_iterations(found.sequences, found.limits, found.bound))
    return {
        "iterations, all requests there at the start": {
            f"proven least, by {found.bound.source}": found.bound.iterations,
            **{f"simulated, {name}": one.iterations for name, one in found.simulated.items()},
        },
        "requests put back (simulated)": {name: one.preemptions for name, one in found.simulated.items()},
        "certificate": dict(found.bound.certificate),
    }


def _confirm(violation: object) -> None:
    if violation is not None:
        raise RuntimeError(f"the bound does not stand up to its check: {violation}")
