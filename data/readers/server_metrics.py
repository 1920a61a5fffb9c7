"""Metrics page of a server, in Prometheus' format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_ITERATIONS = ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total")
_PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
_STARTED = ("vllm:num_preemptions_created", "process_start_time_seconds")
_DRAFTS = "vllm:spec_decode_"
_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_ACCEPT_LENGTH = ("sglang:spec_accept_length", "sglang:avg_spec_accept_length")
_CACHED = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total")


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Counters of a server at one moment; None if missing.

    engine: ``vllm``, ``sglang``, ``llama.cpp`` or ``unknown``, by the names of its metrics.
    running, waiting: Requests in progress and in the queue.
    iterations, preemptions, cached_tokens: Counts since the server started: iterations, preemptions for lack
    of KV cache, and prompt tokens from the prefix cache.
    kv_tokens, block_tokens: Tokens of its KV cache, and of one block.
    prefix_caching: True if prompts may share KV cache.
    started: Start of the counters in seconds since 1970.
    speculates: True if the server drafts tokens; None if unknown.
    drafts: Most drafted tokens of a sequence in an iteration; None if unknown.
    engines: Engines behind the address; None if the samples name none.
    """

    engine: str = "unknown"
    running: int | None = None
    waiting: int | None = None
    iterations: int | None = None
    preemptions: int | None = None
    cached_tokens: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool | None = None
    started: float | None = None
    speculates: bool | None = None
    drafts: int | None = None
    engines: int | None = None


def parse_metrics(text: str) -> ServerMetrics:
    """Return the counters of a metrics page."""
    totals: dict[str, float] = {}
    engines, positions = set[str](), set[int]()
    labels: dict[str, Mapping[str, str]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, value = sample[1], _number(sample[3])
        totals[name] = totals.get(name, 0.0) + value
        of = dict(_LABEL.findall(sample[2] or ""))
        labels.setdefault(name, of)
        if name.startswith("vllm:") and "engine" in of:
            engines.add(of["engine"])
        if name.startswith(_POSITION) and (position := _whole(of.get("position"))) is not None:
            positions.add(position)
    known = (("vllm:", "vllm"), ("sglang:", "sglang"), ("llamacpp:", "llama.cpp"))
    engine = next((name for start, name in known if any(key.startswith(start) for key in totals)), "unknown")
    cache = labels.get("vllm:cache_config_info", {})
    block = _whole(cache.get("block_size"))
    kv = _whole(cache.get("kv_cache_size_tokens"))
    blocks = _whole(cache.get("num_gpu_blocks"))
    if kv is None and block is not None and blocks is not None:
        kv = block * blocks
    if kv is not None and block is not None:
        kv = max(block, kv - block)  # vLLM never hands out one block
    caching = cache.get("enable_prefix_caching")
    speculates = _speculates(totals, engine)
    return ServerMetrics(
        engine=engine,
        running=_first(totals, _RUNNING),
        waiting=_first(totals, _WAITING),
        iterations=_first(totals, _ITERATIONS),
        preemptions=_first(totals, _PREEMPTIONS),
        cached_tokens=_first(totals, _CACHED),
        kv_tokens=kv * max(1, len(engines))
        if kv is not None
        else _first(totals, ("sglang:max_total_num_tokens",)),
        block_tokens=block,
        prefix_caching=None if caching is None else caching == "True",
        started=next((totals[name] for name in _STARTED if name in totals), None),
        speculates=speculates,
        drafts=0 if speculates is False else max(positions) + 1 if positions else None,
        engines=len(engines) or None,
    )


def _speculates(totals: Mapping[str, float], engine: str) -> bool | None:
    """Return whether an engine drafts tokens.

    vLLM then has counters of drafts.
    """
    if any(name.startswith(_DRAFTS) for name in totals):
        return True
    if any(totals.get(name, 0.0) > 0 for name in _ACCEPT_LENGTH):
        return True
    return False if engine == "vllm" and "vllm:num_requests_running" in totals else None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < float("inf") else 0.0


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _first(totals: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    return next((round(totals[name]) for name in names if name in totals), None)
