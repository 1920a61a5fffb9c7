"""
batchbound's engine as a rollout of verl: ``actor_rollout_ref.rollout.name=batchbound``.

Put this folder on ``PYTHONPATH`` and set ``VERL_USE_EXTERNAL_MODULES=verl_rollout``: verl then imports this
module in each of its processes. ``actor_rollout_ref.rollout.engine_kwargs.batchbound`` holds options of
``LLM.from_pretrained``. A replica is one process with the whole model. Prompts and completions are token ids,
without images; there is no OpenAI endpoint. The KV cache stays on the device between steps.

Tested with verl 0.9.1 on a CPU: servers, load balancer, agent loops, weight updates and the GRPO trainer. It
has not run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from batchbound.executor.gathering import Gathering
from batchbound.executor.llm import LLM

NAME = "batchbound"


class Server:
    """
    The process that generates for a replica.

    Parameters
    ----------
    config, model_config
        verl's ``RolloutConfig`` and ``HFModelConfig``.
    replica
        Rank of the replica.
    device
        Of the model.
    """

    def __init__(self, config: Any, model_config: Any, replica: int, device: str) -> None:
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        options = {
            "tokenizer": model.local_tokenizer_path,
            "load_format": "dummy" if config.load_format == "dummy" else "auto",
            "dtype": config.dtype,
            "device": device,
            "slots": config.max_num_seqs,
            **config.engine_kwargs.get(NAME, {}),
        }
        engine = LLM.from_pretrained(model.local_path, **options)
        self._config = config
        self._steps: int | None = None
        self._mode = "raw" if config.logprobs_mode == "raw_logprobs" else "processed"
        self._gathering = Gathering(engine, seed=config.seed + replica)

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """Return a completion, as verl's own servers do; raise ValueError for what cannot be served."""
        if given := [name for name, value in media.items() if value]:
            raise ValueError(f"batchbound serves no {', '.join(given)}: prompts are token ids alone")
        asked, config = dict(sampling_params), self._config
        room = config.prompt_length + config.response_length - len(prompt_ids)
        most = asked.pop("max_new_tokens", min(config.response_length, room))
        most = max(1, asked.pop("max_tokens", most))
        told = asked.pop("logprobs", False)
        asked.setdefault("repetition_penalty", config.repetition_penalty)
        asked.setdefault("ignore_eos", config.ignore_eos)
        if told:
            asked |= {"logprobs": 0, "logprobs_mode": self._mode}
        done = await self._gathering.complete(prompt_ids, most, **asked)
        return TokenOutput(
            token_ids=list(done.completion_ids),
            log_probs=list(done.log_probabilities or ()) if told else None,
            stop_reason="completed",
            extra_fields={"global_steps": self._steps},
        )

    async def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take over some weights, between two calls."""
        await self._gathering.load(weights)

    async def set_global_steps(self, steps: int | None) -> None:
        """Remember the step that the weights are of."""
        self._steps = steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Finish what runs, and begin nothing before ``resume_generation``: nothing is thrown away."""
        await self._gathering.pause()

    async def resume_generation(self) -> None:
        """Go on."""
        self._gathering.resume()

    async def sleep(self, *_: Any, **__: Any) -> None:
        """Do nothing: between calls there is nothing that could be released."""

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = sleep


class Replica(RolloutReplica):  # type: ignore[misc]  # verl is not there to be checked
    """A server beside the worker whose device it shares."""

    async def launch_servers(self) -> None:
        """Start the server; raise ValueError for what one process with a text model cannot be."""
        if self.world_size != 1 or self.is_reward_model or self.is_teacher_model:
            raise ValueError(
                "batchbound serves the policy, each replica on one device:"
                " set tensor_model_parallel_size and data_parallel_size to 1"
            )
        node, device = await self.workers[0].__ray_call__.remote(_place)
        name = _name(self.replica_rank)
        server = (
            ray.remote(Server)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
                name=name,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.replica_rank, device)
        )
        await server.sleep.remote()  # Once it answers, its model is there.
        self.servers, self._server_handle, self._server_address = [server], server, name


class ServerAdapter(base.BaseRollout):  # type: ignore[misc]  # verl is not there to be checked
    """What a training worker tells its replica's server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing: see :class:`Server`."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **given: Any
    ) -> None:
        """Send weights to the server in buckets of ``update_weights_bucket_megabytes``."""
        if wire_format != "named_tensors" or given.get("peft_config") is not None:
            raise ValueError(
                "batchbound takes whole weights: set model.lora.merge=True, and no delta_sharded backend"
            )
        if self._server is None:
            self._server = ray.get_actor(_name(self.replica_rank))
        most = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[tuple[str, torch.Tensor]] = []
        async for name, weight in ensure_async_iterator(weights):
            if bucket and sum(each.nbytes for _, each in bucket) + weight.nbytes > most:
                await self._server.load.remote(bucket)
                bucket = []
            bucket.append((name, weight.detach().cpu()))
        await self._server.load.remote(bucket)
        await self._server.set_global_steps.remote(global_steps)


def _name(replica: int) -> str:
    return f"{NAME}_server_{replica}"


def _place(worker: Any) -> tuple[str, str]:
    """Return the node and the device of a worker."""
    context, platform = ray.get_runtime_context(), get_platform()
    (device, *_) = context.get_accelerator_ids().get(platform.ray_resource_name(), []) or ["0"]
    return context.get_node_id(), f"cuda:{device}" if torch.cuda.is_available() else "cpu"


RolloutReplicaRegistry.register(NAME, lambda: Replica)
base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.ServerAdapter"
