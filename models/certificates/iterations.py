"""Independent check of a bound on iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...data.iterations import EngineLimits, IterationBound, Sequences
from ...data.schedule import Violation
from .beginnings import Beginnings, blocks_drawn


def verify_iterations(
    sequences: Sequences, limits: EngineLimits, bound: IterationBound, drafts: int | None = 0
) -> Violation | None:
    """Return an error in a bound on iterations, or None if proven.

    Everything is counted again from the sequences, one by one, by code that shares nothing with the bound's.
    The engine drafts at most ``drafts`` tokens of a sequence an iteration; None if unknown.
    """
    claim = bound.certificate
    try:
        kind, drafted = str(claim["kind"]), claim.get("drafts", 0)
        if type(drafted) is not int or drafted < 0:
            raise TypeError("drafts are no whole number")
        if kind not in ("tokens", "none") and (drafts is None or drafted < drafts):
            per_iteration = "an unknown number" if drafts is None else f"up to {drafts}"
            return Violation(
                "one token an iteration", f"it holds for {drafted} drafts, the engine makes {per_iteration}"
            )
        proven = _proven(sequences, limits, kind, claim.get("heaviest"), claim.get("machines"), drafted)
    except (KeyError, TypeError, ValueError) as error:
        return Violation("a certificate is readable", f"{type(error).__name__}: {error}")
    if isinstance(proven, Violation):
        return proven
    if bound.iterations > proven:
        what = f"it proves {proven} iterations, the bound says {bound.iterations}"
        return Violation("the certificate proves the bound", what)
    return None


def _proven(
    sequences: Sequences, limits: EngineLimits, kind: str, heaviest: object, machines: object, drafts: int
) -> int | Violation:
    if kind == "none":
        return 0
    needed: list[int] = [
        math.ceil(output / (drafts + 1)) - 1 + math.ceil((prompt - shared) / limits.batched_tokens)
        for (prompt, output, _), shared in zip(_rows(sequences), _shared(sequences), strict=True)
    ]
    if kind == "slots":
        return math.ceil(sum(needed) / limits.sequences)
    if kind == "longest":
        return max(needed)
    if kind == "tokens":
        computed = sum(prompt - cached + output - 1 for prompt, output, cached in _rows(sequences))
        return math.ceil(computed / limits.batched_tokens)
    if not sequences.exact:
        return Violation("iterations", f"{kind} needs the length of each completion, not their sum")
    if kind == "KV":
        return _kv(sequences, limits, drafts)
    if kind == "packing":
        if type(heaviest) is not int or type(machines) is not int:
            raise TypeError("heaviest and machines are no whole numbers")
        short = _short(sequences, limits, drafts)
        return short or _packing(limits, sorted(needed, reverse=True)[:heaviest], machines)
    return Violation("a certificate is of a known kind", f"{kind!r} is not")


def _rows(sequences: Sequences) -> list[list[int]]:
    cached: list[int] = sequences.cached.tolist()
    if sequences.tree is not None:
        cached, _ = Beginnings.of_tree(sequences.tree).reused(sequences.output.tolist())
    return [
        list(row) for row in zip(sequences.prompt.tolist(), sequences.output.tolist(), cached, strict=True)
    ]


def _shared(sequences: Sequences) -> list[int]:
    shared: list[int] = sequences.shared.tolist()
    if sequences.tree is not None:
        _, shared = Beginnings.of_tree(sequences.tree).reused(sequences.output.tolist())
    return shared


def _kv(sequences: Sequences, limits: EngineLimits, drafts: int) -> int | Violation:
    if limits.blocks is None:
        return Violation("iterations", "the KV cache has no limit")
    if sequences.tree is not None:
        draws = [math.ceil(output / (drafts + 1)) for output in sequences.output.tolist()]
        return Beginnings.of_tree(sequences.tree).least_iterations(draws, limits)
    size, kv_tokens = limits.block_tokens, 0
    for prompt, output, cached in _rows(sequences):
        # If all but the last token are cached, another prompt may hold the last one, too. Blocks of one token
        # may hold equal prompts of one token.
        own = 0 if cached == prompt - 1 and (cached or size == 1) else prompt - cached
        # At least one token is drawn in each of the draws before the last.
        kv_tokens += blocks_drawn(own, math.ceil(output / (drafts + 1)), size)
    return math.ceil(kv_tokens / limits.blocks)


def _short(sequences: Sequences, limits: EngineLimits, drafts: int) -> Violation | None:
    """Return a violation if the KV cache may run out."""
    if limits.blocks is None:
        return None
    peaks = sorted(math.ceil((p + a + drafts - 1) / limits.block_tokens) for p, a, _ in _rows(sequences))
    if sum(peaks[-limits.sequences :]) <= limits.blocks:
        return None
    return Violation("iterations", "requests may be evicted, and then share no slot")


def _packing(limits: EngineLimits, heavy: list[int], machines: int) -> int | Violation:
    if not 1 <= machines <= limits.sequences:
        return Violation("iterations", f"{machines} of {limits.sequences} slots cannot be chosen")
    # Dealt out evenly is the fewest that the fullest slots can hold.
    dealt = [len(heavy) // limits.sequences + (k < len(heavy) % limits.sequences) for k in range(machines)]
    return math.ceil(sum(sorted(heavy)[: sum(dealt)]) / machines)


def verify_iteration_seconds(
    sequences: Sequences,
    limits: EngineLimits,
    bound: IterationBound,
    rates: Mapping[str, float],
    seconds: float,
    *,
    resumed_known: bool = False,
) -> Violation | None:
    """Return an error if ``seconds`` exceed the least at the stated rates."""
    wrong = verify_iterations(sequences, limits, bound)
    if wrong is not None:
        return wrong
    kinds = {"iterations", "decodes", "prompt_tokens", "drawn", "kv_tokens", "pairs"}
    if set(rates) != kinds:
        return Violation("rates", f"there are rates of {sorted(rates)}, not of {sorted(kinds)}")
    below = [name for name, rate in rates.items() if not rate >= 0 and name != "drawn"]
    if below:
        return Violation(
            "rates", f"{below[0]} is below zero: work that need not be done would lower the bound"
        )
    dear = rates["decodes"] + rates["kv_tokens"] > rates["prompt_tokens"]
    if dear and not resumed_known and sequences.may_run_short(limits):
        # Put back, a request may compute a chunk of m tokens in the place of a decode that reads m.
        return Violation("rates", "a decode counts more than the chunk that may take its place")
    needed = dict.fromkeys(kinds, 0.0)
    needed["iterations"] = bound.iterations
    for prompt, output, cached in _rows(sequences):
        needed["decodes"] += output - 1
        needed["prompt_tokens"] += prompt - cached
        needed["drawn"] += output
        needed["kv_tokens"] += sum(prompt + drawn for drawn in range(1, output))
        # Each new token with those before it and half of itself, whatever the chunks.
        needed["pairs"] += sum(before + 0.5 for before in range(cached, prompt))
    proven = math.fsum(rates[name] * amount for name, amount in needed.items())
    # Written so that NaN fails, too.
    if not seconds <= proven * (1 + 1e-9):
        what = f"the rates prove {proven:.9g} s, the bound says {seconds:.9g}"
        return Violation("the certificate proves the bound", what)
    return None
