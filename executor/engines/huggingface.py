"""Engine that serves requests on a transformers model."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError
from ...data.kept_beginnings import path_of
from ...data.problem import Problem
from ...data.trace import DISTINCT, Stage
from ..models.mixed_sampling import MixedSampler
from ..models.sampling import Sampler
from ..models.wrapped import Evaluation, unwrapped
from .beginnings import ReusedBeginnings, SharedBeginnings
from .device_memory import keep_freed_memory
from .offloading import OffloadingBatch
from .tiers import Tier, choose_tier

if TYPE_CHECKING:
    from ..kv.store import Path
    from ..models.sampling import TokenRule

NO_EOS: frozenset[int] = frozenset()
"""No end tokens: every completion has its full length."""


PART_SECONDS = 0.5
"""Seconds between reports of a long decode stage; larger shows progress later."""


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of decoding.

    eos_ids: Tokens that end a completion, included in it; with :data:`NO_EOS` every completion has its full
        length.
    sampler: Choice of tokens, and ends of requests beyond ``eos_ids``; greedy by default.
    kv_tokens: Most KV tokens on the device, padding included; further requests take turns with the host. None
        for as many as the slots need.
    begun: Earlier tokens of completions by request, which count as prompt and towards the most tokens.
    share_prompts: Compute a beginning that several prompts share once. Without it a completion's bits do not
        depend on the other prompts.
    reuse: Keep the KV cache of ended completions while memory allows, for prompts that begin with them.
    """

    eos_ids: frozenset[int] = NO_EOS
    sampler: TokenRule | None = None
    kv_tokens: int | None = None
    begun: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    share_prompts: bool = True
    reuse: bool = False


_GREEDY = DecodeOptions()


class HuggingFaceEngine:
    """Engine with a running batch on a transformers model.

    Shapes: most_tokens (requests,).
    """

    def __init__(
        self,
        problem: Problem,
        model: Any,
        prompts: Sequence[Sequence[int]],
        most_tokens: IntArray,
        *,
        decoding: DecodeOptions = _GREEDY,
        tier: Tier | None = None,
        on_token: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not problem.prefill_emits_first_token:
            raise ValueError(
                "an engine's prefill emits the first token; the problem counts a decode step for it"
            )
        begun = np.zeros(len(prompts), dtype=np.int64)
        begun[list(decoding.begun)] = [len(tokens) for tokens in decoding.begun.values()]
        for index, prompt in enumerate(prompts):
            if problem.prompt_tokens[index] != len(prompt) + begun[index]:
                name = str(problem.workload.ids[index])
                planned = int(problem.prompt_tokens[index])
                raise ValueError(
                    f"the prompt of {name!r} has {len(prompt) + begun[index]} tokens, the plan counts"
                    f" {planned}"
                )
        _refuse_unlike(problem, prompts)
        # The buffers grow for a completion that outgrows the plan; without max_tokens it might fill the
        # model.
        expected = np.minimum(most_tokens - begun, problem.workload.output_tokens)
        capacity = int((problem.prompt_tokens + expected).max())
        self._model = inner = unwrapped(model)
        self._evaluating = Evaluation(inner)
        if inner.device.type == "cpu":
            keep_freed_memory()
        slots = (
            problem.slots
            if decoding.kv_tokens is None
            else min(problem.slots, decoding.kv_tokens // capacity)
        )
        if slots < 1:
            raise InputError(
                f"{decoding.kv_tokens} tokens of KV cache do not hold the longest request, of {capacity}",
                hint="Allow more with --kv-tokens, or leave it out.",
            )
        self._names = [str(name) for name in problem.workload.ids]
        self._rule: TokenRule = decoding.sampler or Sampler()
        self._told = on_token is not None
        self._watched = self._told or self._rule.watches_text
        self._ends = decoding.eos_ids | self._rule.ends
        self._tier = choose_tier(model) if tier is None else tier
        make = self._tier.batch
        options: dict[str, Any] = {"sampler": decoding.sampler}
        self._beginnings = SharedBeginnings(prompts, problem.tree) if decoding.share_prompts else None
        if self._beginnings is not None and self._tier.name == "ragged":
            # On the host memory is ample: beginnings that no row reads may take as much again as the slots.
            roomy = inner.device.type == "cpu" and decoding.kv_tokens is None and problem.kv_capacity is None
            most = problem.prefix_cache
            if problem.tree is None:
                most = most or (slots * capacity if roomy else 0)
            elif inner.device.type != "cpu" and problem.kv_capacity is None:
                most = min(most, slots * capacity // 4)
            if decoding.reuse and roomy:
                most = slots * capacity
            options["shared_tokens"] = most if decoding.reuse else min(most, self._beginnings.tokens)
        if problem.kv_capacity is not None and decoding.kv_tokens is None:
            longest = int((problem.prompt_tokens + most_tokens - begun).max())
            options |= _within(problem.kv_capacity, self._tier, slots, (capacity, longest))
        with self._evaluating():
            self._residence = OffloadingBatch(
                lambda slots: make(inner, slots, capacity, **options),
                slots,
                self._names,
                host_tokens=problem.slots * capacity,
            )
        self._prompts, self._most, self._eos = prompts, most_tokens, decoding.eos_ids
        self._on_token = on_token
        self.on_part: Callable[[Stage], None] | None = None
        """Function to call with the part of a long decode stage that has run, a few times a second."""
        self._part_steps = 1
        self._slot_of: dict[int, int] = {}
        self._clock, self._origin = clock, clock()
        self.answers: list[list[int]] = [list(decoding.begun.get(index, ())) for index in range(len(prompts))]
        reuse = decoding.reuse and decoding.share_prompts
        self._reused = ReusedBeginnings(self._residence.split) if reuse else None
        # Requests with a final last token that was not fed to the model.
        self._resumed = set(decoding.begun)
        # Requests with a last token fed to the model under other weights and not drawn again.
        self._drawn: set[int] = set()

    @property
    def time(self) -> float:
        """Seconds since the engine was made."""
        return self._clock() - self._origin

    def leave_out(self, since: float) -> None:
        """Leave out the time since then, in which there was nothing to do."""
        self._origin += self.time - since

    def prefill(self, requests: Sequence[int], slots: Sequence[int]) -> tuple[Stage, list[int]]:
        """Prefill requests together; return the stage and finished requests.

        An evicted one continues from its KV cache on the host.
        """
        start = self.time
        self._slot_of.update((int(request), int(slot)) for request, slot in zip(requests, slots, strict=True))
        fresh = [int(request) for request in requests if not self._residence.resume(int(request))]
        # The last token of an evicted request was never fed to the model, so prefill yields it again.
        kept = [
            self.answers[request] if request in self._resumed else self.answers[request][:-1]
            for request in fresh
        ]
        prompts = [[*self._prompts[request], *tokens] for request, tokens in zip(fresh, kept, strict=True)]
        before, shared = self._residence.prefilled, self._beginnings
        with self._evaluating():
            first = self._residence.prefill(
                fresh,
                prompts,
                [len(tokens) for tokens in kept],
                self._paths(fresh, prompts),
                [self.answers[request][-1] if request in self._drawn else -1 for request in fresh],
            )
        if shared is not None and self._reused is None:
            self._residence.forget(shared.begin(fresh))
        self._drawn.difference_update(fresh)
        for request, tokens, token in zip(fresh, kept, first, strict=True):
            new = not self.answers[request] or request in self._resumed
            self._resumed.discard(request)
            self.answers[request] = [*tokens, token]
            if new and self._on_token is not None:
                self._on_token(request, token)
        count = self._residence.prefilled - before
        stage = Stage("prefill", start, self.time, 0, len(requests), count, count, count)
        return stage, self._release(requests)

    def decode(self, decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        """Decode until an end, ``decode_steps`` steps, or ``until``."""
        start = self.time
        requests = sorted(self._slot_of, key=self._slot_of.__getitem__)
        active = len(requests)
        held = self._residence.kv_tokens + active
        burst = min(decode_steps, *(int(self._most[i]) - len(self.answers[i]) for i in requests))
        # Clock and tokens are read back once for the whole burst, or a few times a second to show progress.
        at_once = burst if until == float("inf") and not self._watched else 1
        done, beyond, padding = 0, 0, self._residence.padding_read
        finished: list[int] = []
        while done < burst and not finished:
            with self._evaluating():
                tokens = self._residence.decode(
                    min(at_once, burst - done, burst if self.on_part is None else self._part_steps),
                    lambda request: len(self.answers[request]),
                    until=self._ends,
                )
            for request in requests:
                beyond += self._append_up_to_cap(request, tokens[request])
            done += len(tokens[requests[0]])
            finished = self._release(requests)
            self._part_steps = max(1, int(done * PART_SECONDS / max(self.time - start, 1e-9)))
            if self.on_part is not None and done < burst and not finished:
                self.on_part(Stage("decode", start, self.time, done, active, done * active, 0, 0))
            if self.time >= until:
                break
        kv = done * held + active * (done * (done - 1) // 2)
        padded_kv = kv + round(self._residence.padding_read - padding)
        return Stage(
            "decode", start, self.time, done, active, done * active - beyond, kv, padded_kv
        ), finished

    def evict(self, requests: Sequence[int]) -> None:
        """Free slots; keep their tokens, and their KV cache on the host."""
        for request in requests:
            del self._slot_of[request]
            self._residence.suspend(int(request))

    def reload_weights(self) -> None:
        """Use the model's current weights; stored KV cache stays."""
        self._residence.reload_weights()

    def forget_prompts(self) -> None:
        """Drop stored shared prompts."""
        self._residence.forget()
        if self._reused is not None:
            self._reused.forget()

    def recompute(self) -> None:
        """Drop the whole KV cache after a change of weights; tokens stay."""
        self._residence.let_go()
        self.forget_prompts()
        self._drawn = {
            request for request, tokens in enumerate(self.answers) if tokens and request not in self._resumed
        }

    def restart(self, requests: Sequence[int]) -> None:
        """Drop all tokens of requests that do not run."""
        begun = [request for request in requests if self.answers[request]]
        if self._beginnings is not None:
            self._beginnings.begin_again(begun)
        for request in begun:
            self.answers[request] = []
            self._residence.drop(request)

    def extend(self, problem: Problem, most_tokens: IntArray, begun: Mapping[int, tuple[int, ...]]) -> None:
        """Add the requests at the end of a longer problem, whose prompts and rules have been added."""
        first = len(self.answers)
        self._most = most_tokens
        self._names += [str(name) for name in problem.workload.ids[first:]]
        self.answers += [list(begun.get(index, ())) for index in range(first, len(problem))]
        self._resumed.update(begun)
        self._ends = self._eos | self._rule.ends
        self._watched = self._told or self._rule.watches_text
        if self._model.device.type == "cuda":
            # Captured decode steps hold the rules of before.
            self._residence.rebuild()

    def drop(self, request: int) -> None:
        """Drop the KV cache of an evicted request, which does not continue."""
        self._residence.drop(request)

    def give(self, request: int, tokens: Sequence[int]) -> None:
        """Append given tokens to an ended completion, which may continue."""
        if isinstance(self._rule, MixedSampler):
            self._rule.give(self._names[request], tokens, len(self.answers[request]))
        self.answers[request] += tokens
        self._resumed.add(request)
        self._drawn.discard(request)

    def wait(self, until: float) -> None:
        """Sleep until ``until`` seconds."""
        time.sleep(max(0.0, until - self.time))

    def describe(self) -> Mapping[str, object]:
        """Return the engine's name, model, device, versions and failures."""
        import torch
        import transformers

        from ..attention.float_products import arithmetic_of

        residence, arithmetic = self._residence, arithmetic_of(self._model)
        shared = {}
        if self._beginnings is not None:
            # A prompt may begin with another's completion; each computes a token at least.
            known = self._reused is None
            shared = {DISTINCT: self._beginnings.distinct_tokens if known else len(self.answers)}
        troubles = {} if arithmetic is None or not arithmetic.widened else {"products": "float32"}
        if residence.ran_out or residence.moved:
            troubles["memory"] = (
                f"ran out {residence.ran_out} times; {residence.slots} requests fit at once, and requests"
                f" moved to the host {residence.moved} times"
            )
        return {
            "name": "huggingface",
            "tier": self._tier.name,
            "tier_reason": self._tier.reason,
            "tier_check": self._tier.check,
            "model": str(self._model.config.name_or_path or self._model.config.model_type),
            "device": _device_name(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            **shared,
            **troubles,
        }

    def end_turns(self, request: int) -> None:
        """Drop the KV cache of the last turn of a completion that does not continue."""
        if self._reused is not None:
            self._residence.forget([self._keep(request)[0]])

    def _paths(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[Path]:
        """Return the beginnings of requests, whose prompts include their tokens so far."""
        if self._reused is None:
            shared = self._beginnings
            return [() if shared is None else shared.path(request) for request in requests]
        for prompt in prompts:
            self._reused.add(tuple(prompt[:-1]))
        # Later prompts branch off from earlier ones, which then have more beginnings.
        return [self._reused.add(tuple(prompt[:-1])) for prompt in prompts]

    def _keep(self, request: int) -> tuple[int, int, int]:
        """Return the last beginning of a completion: its name, first token and the one after."""
        assert self._reused is not None
        # Its last token was not fed to the model.
        path = self._reused.add((*self._prompts[request], *self.answers[request][:-1]))
        name, end = path[-1]
        return name, path[-2][1] if path[1:] else 0, end

    def _append_up_to_cap(self, request: int, tokens: Sequence[int]) -> int:
        """Add tokens up to the end; return how many are beyond it."""
        answer = self.answers[request]
        for at, token in enumerate(tokens, start=1):
            answer.append(token)
            if self._on_token is not None:
                self._on_token(request, token)
            if token in self._ends and self._ended(request):
                return len(tokens) - at
        return 0

    def _release(self, requests: Sequence[int]) -> list[int]:
        finished = [
            request
            for request in requests
            if len(self.answers[request]) >= self._most[request] or self._ended(request)
        ]
        for request in finished:
            del self._slot_of[request]
            self._residence.finish(int(request), None if self._reused is None else self._keep(request))
        return finished

    def _ended(self, request: int) -> bool:
        tokens = self.answers[request]
        ended = self._rule.ended(self._names[request], tokens)
        return tokens[-1] in self._eos if ended is None else ended


def _refuse_unlike(problem: Problem, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InputError if prompts do not share what the plan says."""
    tree = problem.tree
    if tree is None:
        return
    parents, through = tree.parent.tolist(), tree.through.tolist()
    first: dict[int, int] = {}
    for index, leaf in enumerate(tree.leaf.tolist()):
        for node in reversed(path_of(parents, leaf)):
            met, other = node in first, first.setdefault(node, index)
            if tuple(prompts[index][: through[node]]) != tuple(prompts[other][: through[node]]):
                name, of = (str(problem.workload.ids[i]) for i in (index, other))
                raise InputError(
                    f"the prompt of {name!r} does not begin as that of {of!r}, and the plan shares"
                    f" {through[node]} tokens",
                    hint="Plan again.",
                )
            if met:
                # The first request below the node begins as all above it do.
                break


def _within(kv_capacity: int, tier: Tier, slots: int, longest: tuple[int, int]) -> dict[str, Any]:
    """Return a batch's options for exactly a plan's KV capacity.

    ``longest`` are the tokens of the longest request as planned, and at most.
    """
    from ..kv.window_batch import columns_for

    if tier.name == "ragged":
        # No request grows beyond its most tokens, so capacity beyond all slots' need is unused. One that
        # outgrows the plan alone fits all the same.
        return {"kv_tokens": min(max(kv_capacity, longest[1]), slots * longest[1])}
    columns = columns_for(longest[0])
    if slots * columns > kv_capacity:
        fits = kv_capacity // columns
        fewer = f"Plan with --slots {fits}," if fits else "Plan"
        raise InputError(
            f"the {tier.name} tier holds rows side by side, {slots} slots of {columns} tokens, and the plan's"
            f" KV capacity is {kv_capacity} tokens ({tier.reason})",
            hint=f"{fewer} without --kv-capacity, or run with --kv-tokens.",
        )
    return {}


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens a model has an embedding for."""
    # Read from the weight: adapters on the embedding have no such number.
    return int(unwrapped(model).get_input_embeddings().weight.shape[0])


def facts_of_bits(model: Any, product_rows: int) -> dict[str, object]:
    """Return the facts, besides inputs, that determine a repeatable run's bits."""
    import torch

    from ..attention.host_kernels import machine_name

    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "product_rows": product_rows,
        "processor": hashlib.sha256(machine_name().encode()).hexdigest()[:16],
    }


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
