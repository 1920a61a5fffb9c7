"""Engines of ours under OpenRLHF's own samples generator: skipped where it or its vLLM is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_checkpoint import tiny_model, write_checkpoint

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("openrlhf", reason="OpenRLHF is not installed")
vllm = pytest.importorskip("vllm", reason="OpenRLHF imports vLLM, which is not installed")
ray = pytest.importorskip("ray", reason="the ray extra is not installed")

from openrlhf_rollout import Engine, create_engines

# What OpenRLHF and its peers say of their own futures is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS, SAMPLES = ["w5 w6 w7", "w8 w9", "w10"], 4


def asked_as_its_trainer_does(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "num_engines": 2,
        "tensor_parallel_size": 1,
        "pretrain": str(folder),
        "seed": 0,
        "full_determinism": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_model_len": 32,
        "shared_pg": None,
        "gpu_memory_utilization": 0.5,
        "vllm_enable_sleep": True,
        "logprobs_mode": "processed_logprobs",
        "agent_func_path": None,
        "remote_rm_url": None,
        "max_images_per_prompt": 0,
        **changed,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[list[Any]]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    *positional, _, _, _ = asked_as_its_trainer_does(checkpoint).values()
    yield create_engines(*positional, agent_func_path=None, remote_rm_url=None, max_images_per_prompt=0)
    ray.shutdown()


def samples(engines: list[Any], checkpoint: Path) -> list[Any]:
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from transformers import AutoTokenizer

    args = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=3, n_samples_per_prompt=SAMPLES, vllm_generate_batch_size=None),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
        ),
        vllm=SimpleNamespace(enable_sleep=True),
    )
    loader = [(None, PROMPTS, ["label"] * 3, [None] * 3)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    generator = SamplesGenerator(SimpleNamespace(args=args), loader, None, tokenizer, engines)
    found, _, prompts, _ = generator.generate_samples(
        temperature=0.7, top_p=1.0, max_new_tokens=12, min_new_tokens=0, max_len=32
    )
    assert prompts == len(PROMPTS)
    return list(found)


def furthest(found: list[Any], model: Any) -> float:
    """Return by how much log-probabilities of samples miss those of a model, at most."""
    missed = []
    for one in found:
        with torch.no_grad():
            told = torch.log_softmax(model(one.sequences).logits[:, :-1] / 0.7, -1)
        own = told.gather(2, one.sequences[:, 1:, None])[..., 0]
        missed.append(float((own - one.rollout_log_probs)[one.action_mask.bool()].abs().max()))
    return max(missed)


def sender() -> Any:
    """Return what sends weights as OpenRLHF's policy actor does with Ray; its own needs a GPU."""

    class Sender:
        def join(self, world: int) -> None:
            from ray.util import collective

            collective.init_collective_group(world, 0, backend="gloo", group_name="weights")

        def send(self, weight: Any) -> None:
            from ray.util import collective

            collective.broadcast(weight.clone(), 0, group_name="weights")

    return ray.remote(Sender).remote()


def test_its_samples_and_log_probabilities_are_those_of_the_weights_it_sends(
    engines: list[Any], checkpoint: Path
) -> None:
    found = samples(engines, checkpoint)
    assert sorted(one.prompts[0] for one in found) == sorted(PROMPTS * SAMPLES)
    assert len({tuple(one.sequences[0].tolist()) for one in found}) > len(PROMPTS)
    assert all(int(one.response_length) <= 12 for one in found)
    assert furthest(found, tiny_model(0)) < 1e-5

    trainer = sender()
    world = len(engines) + 1
    joined = [
        engine.init_process_group.remote(
            "127.0.0.1", 1, k + 1, world, "weights", backend="gloo", use_ray=True
        )
        for k, engine in enumerate(engines)
    ]
    ray.get([trainer.join.remote(world), *joined])
    for name, weight in tiny_model(1).named_parameters():
        received = [
            engine.update_weight.remote(name, dtype=weight.dtype, shape=weight.shape) for engine in engines
        ]
        ray.get([*received, trainer.send.remote(weight.detach())])
    found = samples(engines, checkpoint)
    assert furthest(found, tiny_model(1)) < 1e-5
    assert furthest(found, tiny_model(0)) > 1e-2


def test_what_an_engine_cannot_do_is_refused_by_name(engines: list[Any], checkpoint: Path) -> None:
    for name, value in (("tensor_parallel_size", 2), ("shared_pg", "a group"), ("max_images_per_prompt", 1)):
        with pytest.raises(ValueError, match=name):
            create_engines(**asked_as_its_trainer_does(checkpoint, **{name: value}))
    engine = Engine(str(checkpoint))

    async def refused(params: Any, **more: Any) -> None:
        await engine.generate([5, 6], params, **more)

    with pytest.raises(ValueError, match="allowed_token_ids"):
        asyncio.run(refused(vllm.SamplingParams(max_tokens=3, allowed_token_ids=[4])))
    with pytest.raises(ValueError, match="multi_modal_data"):
        asyncio.run(refused(vllm.SamplingParams(max_tokens=3), multi_modal_data={"image": [1]}))
    with pytest.raises(ValueError, match="sync_with_ray"):
        asyncio.run(engine.init_process_group("127.0.0.1", 1, 1, 2, "weights", "nccl", False))
    with pytest.raises(ValueError, match="colocate_all"):
        asyncio.run(engine.update_weight_cuda_ipc("name"))


def test_settings_of_vllm_are_served_by_the_same_names(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint))
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=6, logit_bias={9: 90.0}, stop_token_ids=[9], logprobs=1
    )
    (output,) = asyncio.run(engine.generate([5, 6], params)).outputs
    assert (output.token_ids, output.finish_reason) == ([9], "stop")
    assert output.logprobs is not None
    assert list(output.logprobs[0]) == [9]
