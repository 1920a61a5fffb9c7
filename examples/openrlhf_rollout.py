"""
batchbound's engines in place of the vLLM engines of OpenRLHF.

>>> import openrlhf.trainer.ray  # doctest: +SKIP
>>> openrlhf.trainer.ray.create_vllm_engines = create_engines  # doctest: +SKIP

Done before ``openrlhf.cli.train_ppo_ray`` is imported, its trainer generates with batchbound. An engine is
one process with the whole model; weights come through Ray (``--vllm.sync_with_ray``). OpenRLHF is imported
when engines are made.

Tested with OpenRLHF 0.11.2 on a CPU: samples generator, agent executors, and weights broadcast by Ray. Its
training workers need a GPU; it has not run on one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from batchbound.data.readers.sampling import LogprobsMode, Sampling
from batchbound.executor.completion import Completion
from batchbound.executor.gathering import Gathering
from batchbound.executor.llm import LLM

_OF_TEXT = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "output_kind",
    "output_text_buffer_length",
)
"""What of vLLM's ``SamplingParams`` says how text is made, where only tokens are wanted."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, as vLLM gives it."""

    logprob: float


@dataclass(frozen=True, slots=True)
class Output:
    """A completion with the fields of vLLM's ``CompletionOutput`` that executors read."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an engine's ``generate`` returns: one completion."""

    outputs: list[Output]


class Engine:
    """
    What OpenRLHF asks of a rollout engine; a Ray actor of it stands for its ``RolloutRayActor``.

    Parameters
    ----------
    model
        As :meth:`.LLM.from_pretrained` takes it.
    seed
        Of the choice of tokens.
    logprobs_mode
        Of which distribution log-probabilities are.
    agent_func_path, remote_rm_url
        As OpenRLHF has them: the file of an ``AgentExecutor``, or where rewards come from.
    **options
        Of :meth:`.LLM.from_pretrained`.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        logprobs_mode: LogprobsMode = "raw",
        agent_func_path: str | None = None,
        remote_rm_url: str | None = None,
        **options: Any,
    ) -> None:
        from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
        from openrlhf.utils.agent import SingleTurnAgentExecutor

        self.executor = (
            _load_agent_executor(agent_func_path)
            if agent_func_path
            else SingleTurnAgentExecutor(remote_rm_url)
        )
        self._mode = logprobs_mode
        self._gathering = Gathering(LLM.from_pretrained(model, **options), seed=seed)
        self._group = ""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Outputs:
        """Return one completion, as executors ask for it; raise ValueError for what cannot be served."""
        if multi_modal_data:
            raise ValueError("batchbound serves no multi_modal_data: prompts are token ids alone")
        asked = _asked(sampling_params)
        if sampling_params.logprobs is not None:
            asked |= {"logprobs": 0, "logprobs_mode": self._mode}
        done = await self._gathering.complete(prompt_token_ids, sampling_params.max_tokens, **asked)
        return Outputs([_output(done)])

    async def generate_responses(self, *, num_samples: int = 1, **asked: Any) -> list[Any]:
        """Return what the executor makes of each sample of a prompt."""
        samples = [self.executor.execute(llm_engine=self, **asked) for _ in range(num_samples)]
        return list(await asyncio.gather(*samples))

    async def get_num_unfinished_requests(self) -> int:
        """Return how many requests wait or are served."""
        return self._gathering.unfinished

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        """Join the group in which weights are broadcast; raise ValueError if it is not Ray's."""
        if not use_ray:
            raise ValueError("batchbound takes weights through Ray: set --vllm.sync_with_ray")
        from ray.util import collective

        collective.init_collective_group(world_size, rank_offset, backend, group_name)
        self._group = group_name

    async def update_weight(
        self, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive a weight that the trainer broadcasts."""
        import torch
        from ray.util import collective

        weight = torch.empty(tuple(shape), dtype=dtype, device=self._gathering.engine.model.device)
        await asyncio.to_thread(collective.broadcast, weight, 0, self._group)
        await self._gathering.load([(name, weight)])

    async def update_weight_cuda_ipc(self, *_: Any, **__: Any) -> None:
        """Refuse: this is how engines on the trainer's own device get weights."""
        raise ValueError("batchbound's engines need devices of their own: leave out --train.colocate_all")

    async def pause_generation(self) -> None:
        """Let what runs come to its end, and begin nothing."""
        await self._gathering.pause()

    async def resume_generation(self) -> None:
        """Go on."""
        self._gathering.resume()

    async def sleep(self, *_: Any, **__: Any) -> None:
        """Do nothing: between calls there is nothing that could be released."""

    wake_up = reset_prefix_cache = sleep


def create_engines(*args: Any, **given: Any) -> list[Any]:
    """
    Return engines as OpenRLHF's ``create_vllm_engines`` does, called as that is.

    Each has a GPU where the cluster has any. What tunes vLLM's own memory and compilation has no meaning
    here.

    Raises
    ------
    ValueError
        If an engine is to span devices, to share the trainer's, or to see images.
    """
    import ray
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    asked = inspect.signature(create_vllm_engines).bind(*args, **given).arguments
    wrong = {"tensor_parallel_size": 1, "shared_pg": None, "max_images_per_prompt": 0}
    for name, only in wrong.items():
        if asked.get(name, only) != only:
            raise ValueError(f"{name} is {asked[name]!r}, and batchbound's engines serve {only!r} only")
    mode = "processed" if asked.get("logprobs_mode") == "processed_logprobs" else "raw"
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    actor = ray.remote(Engine)
    return [
        actor.options(num_cpus=1, num_gpus=int(gpu)).remote(
            asked["pretrain"],
            seed=asked["seed"] + k,
            logprobs_mode=mode,
            agent_func_path=asked.get("agent_func_path"),
            remote_rm_url=asked.get("remote_rm_url"),
            dtype="bfloat16" if gpu else "auto",
        )
        for k in range(asked["num_engines"])
    ]


def _asked(params: Any) -> dict[str, Any]:
    """Return what vLLM's ``SamplingParams`` ask, by the names of :class:`.Sampling`."""
    known = {one.name for one in fields(Sampling)} - {"logprobs", "logprobs_mode"}
    usual, found = type(params)(), dict[str, Any]()
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name.startswith("_") or name in (*_OF_TEXT, "max_tokens", "logprobs"):
            continue
        if name not in known:
            if value != getattr(usual, name):
                raise ValueError(f"batchbound cannot serve {name}={value!r}")
        elif value is not None:
            pairs = value.items() if isinstance(value, Mapping) else value
            found[name] = tuple(pairs) if isinstance(pairs, list) or pairs is not value else value
    return found


def _output(done: Completion) -> Output:
    told = done.log_probabilities
    logprobs = told and [
        {token: Logprob(value)} for token, value in zip(done.completion_ids, told, strict=True)
    ]
    return Output(
        done.text, list(done.completion_ids), done.finish_reason, list(logprobs) if logprobs else None
    )
