"""
verl's GRPO trainer on a CPU, with our rollout, on the model in a folder: ``verl_on_cpu.py FOLDER STEPS``.

verl has no platform for CPUs; its processes import this module for one. Its model patches need TRL 0.27, as
verl asks for it, or none.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(1, len(words))
"""


class Device(ModuleType):
    """What verl asks of ``torch.cuda``, answered by the CPU: nothing is allocated, nothing waits."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}
        values = {"mem_get_info": (2**34, 2**34), "get_device_name": "CPU"}
        return ours.get(name) or getattr(torch.cpu, name, lambda *_, **__: values.get(name, 0))


class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl is not there to be checked
    """A platform of one device, which is the CPU; Ray is told of a GPU for it."""

    device_name = vendor_name = "cpu"
    device_module = Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def nothing(self, *_: Any, **__: Any) -> None: ...

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def with_one_backend(backend: str | None = None, *args: Any, **more: Any) -> None:
    """Make a process group where verl names a backend for the CPU and the same for its device."""
    original(None if backend is None else backend.split(",")[0], *args, **more)


original = torch.distributed.init_process_group
torch.distributed.init_process_group = with_one_backend
platform_manager.set_platform(CpuPlatform())


def settings(folder: Path, steps: int) -> list[str]:
    """Return what differs from verl's own configuration: one tiny model in float32, and our rollout."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    asked = {
        f"{model}.path": folder,
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 8,
        f"{actor}.ppo_micro_batch_size_per_gpu": 16,
        f"{actor}.optim.lr": 3e-2,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.model_dtype": "float32",
        f"{actor}.fsdp_config.dtype": "float32",
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        f"{rollout}.name": "batchbound",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.prompt_length": 16,
        f"{rollout}.response_length": 12,
        f"{rollout}.dtype": "float32",
        f"{rollout}.n": 8,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 16,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.engine_kwargs.batchbound.slots": 16,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": 8,
        "data.val_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": folder,
    }
    return [f"{name}={value}" for name, value in asked.items()]


def train(folder: Path, steps: int) -> None:
    """Train with verl's own trainer; it prints a line of figures for each step."""
    import pyarrow as pa
    import ray
    import verl
    from hydra import compose, initialize_config_dir
    from pyarrow import parquet
    from verl.trainer.main_ppo_v0 import TaskRunner

    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{5 + k % 9} w{6 + k % 7}"}],
            "data_source": "words",
            "reward_model": {"ground_truth": "w7", "style": "rule"},
            "extra_info": {"index": k},
        }
        for k in range(32)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    own = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(own), version_base=None):
        config = compose("ppo_trainer", overrides=settings(folder, steps))
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False)
    TaskRunner.__ray_metadata__.modified_class().run(config)


if __name__ == "__main__":
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_on_cpu,verl_rollout"
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # Under this name verl has the engine that CPUs can run, too.
    import verl_rollout  # noqa: F401

    train(Path(sys.argv[1]), int(sys.argv[2]))
