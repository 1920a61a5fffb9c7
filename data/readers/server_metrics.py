"""Metrics page of a server, in Prometheus' format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

Totals = Mapping[str, float]
"""Sum of the samples of each metric."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Counters of a server at one moment; None if missing.

    engine: ``vllm``, ``sglang``, ``llama.cpp`` or ``unknown``, by the names of its metrics.
    running, waiting: Requests in progress and in the queue.
    iterations, preemptions, cached_tokens: Counts since the server started: iterations, preemptions for lack
    of KV cache, and prompt tokens from the prefix cache or from a KV connector.
    looked_up, generated: Prompt tokens looked up in the prefix cache, and tokens generated, since the server
        started.
    kv_tokens, block_tokens: Tokens of its KV cache, and of one block.
    prefix_caching: True if prompts may share KV cache.
    reuse_unit: Tokens by which a beginning is reused.
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
    looked_up: int | None = None
    generated: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool | None = None
    reuse_unit: int | None = None
    started: float | None = None
    speculates: bool | None = None
    drafts: int | None = None
    engines: int | None = None


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Names under which a kind of server counts; the first that is there holds.

    prefix: Beginning of the names of its metrics.
    owner: ``owned_by`` of its models at ``/v1/models``; empty if it states none.
    fetched_tokens: Names of prompt tokens that a KV connector fetched.
    drafts: True if it drafts tokens, None if unknown, by its metrics.
    """

    name: str
    prefix: str
    owner: str = ""
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    iterations: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    cached_tokens: tuple[str, ...] = ()
    fetched_tokens: tuple[str, ...] = ()
    looked_up: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    kv_tokens: tuple[str, ...] = ()
    started: tuple[str, ...] = ("process_start_time_seconds",)
    drafts: Callable[[Totals], bool | None] = lambda totals: None


def _vllm_drafts(totals: Totals) -> bool | None:
    """Return whether there are counters of drafts; a vLLM without drafts has none."""
    if any(name.startswith("vllm:spec_decode_") for name in totals):
        return True
    return False if "vllm:num_requests_running" in totals else None


def _sglang_drafts(totals: Totals) -> bool | None:
    lengths = ("sglang:spec_accept_length", "sglang:avg_spec_accept_length")
    return True if any(totals.get(name, 0.0) > 0 for name in lengths) else None


KINDS = (
    ServerKind(
        "vllm",
        prefix="vllm:",
        owner="vllm",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        iterations=("vllm:iteration_tokens_total_count",),
        preemptions=("vllm:num_preemptions_total", "vllm:num_preemptions"),
        cached_tokens=(
            "vllm:prefix_cache_hits_total",
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits_total",
        ),
        fetched_tokens=("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_hits"),
        looked_up=(
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_queries",
            "vllm:gpu_prefix_cache_queries_total",
        ),
        generated=("vllm:generation_tokens_total", "vllm:generation_tokens"),
        started=("vllm:num_preemptions_created", "process_start_time_seconds"),
        drafts=_vllm_drafts,
    ),
    ServerKind(
        "sglang",
        prefix="sglang:",
        owner="sglang",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_tokens=("sglang:max_total_num_tokens",),
        drafts=_sglang_drafts,
    ),
    ServerKind(
        "llama.cpp",
        prefix="llamacpp:",
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        iterations=("llamacpp:n_decode_total",),
        generated=("llamacpp:tokens_predicted_total",),
    ),
)
"""Kinds of servers, by the names of their metrics."""

UNKNOWN = ServerKind("unknown", prefix="")


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
    kind = next((kind for kind in KINDS if any(name.startswith(kind.prefix) for name in totals)), UNKNOWN)
    cache = labels.get("vllm:cache_config_info", {})
    block, caching = _whole(cache.get("block_size")), cache.get("enable_prefix_caching")
    kv, speculates = _kv_tokens_of(cache), kind.drafts(totals)
    cached = _first(totals, kind.cached_tokens)
    return ServerMetrics(
        engine=kind.name,
        running=_first(totals, kind.running),
        waiting=_first(totals, kind.waiting),
        iterations=_first(totals, kind.iterations),
        preemptions=_first(totals, kind.preemptions),
        cached_tokens=None if cached is None else cached + (_first(totals, kind.fetched_tokens) or 0),
        looked_up=_first(totals, kind.looked_up),
        generated=_first(totals, kind.generated),
        kv_tokens=_first(totals, kind.kv_tokens) if kv is None else kv * max(1, len(engines)),
        block_tokens=block,
        prefix_caching=None if caching is None else caching == "True",
        reuse_unit=_reuse_unit_of(cache),
        started=next((totals[name] for name in kind.started if name in totals), None),
        speculates=speculates,
        drafts=0 if speculates is False else max(positions) + 1 if positions else None,
        engines=len(engines) or None,
    )


def _kv_tokens_of(cache: Mapping[str, str]) -> int | None:
    """Return the tokens that one vLLM engine can hold; it never hands out one block."""
    block, kv = _whole(cache.get("block_size")), _whole(cache.get("kv_cache_size_tokens"))
    blocks = _whole(cache.get("num_gpu_blocks"))
    if kv is None and block is not None and blocks is not None:
        kv = block * blocks
    return kv if kv is None or block is None else max(block, kv - block)


def _reuse_unit_of(cache: Mapping[str, str]) -> int | None:
    """Return the tokens by which vLLM reuses a beginning; None if a block may be larger than that."""
    unit, block = _whole(cache.get("prefix_match_unit")), _whole(cache.get("block_size"))
    # Models with state-space layers have large blocks, and reuse parts of them.
    return unit or (block if _whole(cache.get("mamba_block_size")) is None else None)


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
