"""Our rollout under verl's own servers and agent loops: skipped where verl is not installed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import tiny_model, write_checkpoint

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("verl", reason="verl is not installed")
ray = pytest.importorskip("ray", reason="the ray extra is not installed")

# What verl and its peers say of their own futures is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAME = "verl_rollout"
ROLLOUT = "actor_rollout_ref.rollout"
LONGEST_PROMPT, LONGEST = 16, 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> Any:
    """verl's own configuration, with our rollout."""
    import verl
    from hydra import compose, initialize_config_dir

    asked = {
        "actor_rollout_ref.model.path": checkpoint,
        f"{ROLLOUT}.name": "batchbound",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": 2,
        f"{ROLLOUT}.prompt_length": LONGEST_PROMPT,
        f"{ROLLOUT}.response_length": LONGEST,
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.temperature": 0.7,
        f"{ROLLOUT}.agent.num_workers": 2,
        f"+{ROLLOUT}.engine_kwargs.batchbound.slots": 4,
    }
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in asked.items()])


@pytest.fixture(scope="module")
def manager(config: Any) -> Iterator[Any]:
    """verl's own servers, two of them; Ray is told of GPUs that there are not, since verl asks for some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_USE_EXTERNAL_MODULES", NAME)
        import importlib

        importlib.import_module(NAME)
        from verl.workers.rollout.llm_server import LLMServerManager

        ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False)
        yield LLMServerManager.create(config)
        ray.shutdown()


def update(config: Any, model: Any, step: int, **more: Any) -> None:
    """Send weights as verl's training workers do."""
    from verl.workers.rollout.base import get_rollout_class

    rollout = config.actor_rollout_ref.rollout
    for replica in range(2):
        adapter = get_rollout_class("batchbound")(
            config=rollout,
            model_config=config.actor_rollout_ref.model,
            device_mesh=None,
            replica_rank=replica,
        )
        asyncio.run(adapter.update_weights(iter(model.state_dict().items()), global_steps=step, **more))


def furthest(out: Any, model: Any) -> float:
    """Return by how much a batch's log-probabilities miss those of a model, at most."""
    inputs = {name: out.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        told = torch.log_softmax(model(**inputs).logits[:, LONGEST_PROMPT - 1 : -1] / 0.7, -1)
    own = told.gather(2, out.batch["responses"][..., None])[..., 0]
    return float((own - out.batch["rollout_log_probs"])[out.batch["response_mask"].bool()].abs().max())


def test_its_agent_loops_get_samples_of_the_weights_it_sent(config: Any, manager: Any) -> None:
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager

    loops = AgentLoopManager.create(config=config, llm_client=manager.get_client())
    asked = ["w5 w6 w7"] * 4 + ["w8 w9"] * 4
    messages = np.empty(8, dtype=object)
    messages[:] = [[{"role": "user", "content": text}] for text in asked]
    for step, seed in ((1, 0), (2, 1)):
        update(config, tiny_model(seed), step)
        batch = DataProto.from_dict(
            tensors={"rows": torch.zeros(8, 1)}, non_tensors={"raw_prompt": messages.copy()}
        )
        out = loops.generate_sequences(batch)
        assert out.batch["responses"].shape == (8, LONGEST)
        assert out.batch["prompts"][:, -2:].tolist() == [[6, 7]] * 4 + [[8, 9]] * 4
        assert len({tuple(row) for row in out.batch["responses"].tolist()}) > 2
        assert out.non_tensor_batch["max_global_steps"].tolist() == [step] * 8
        assert furthest(out, tiny_model(seed)) < 1e-5
        assert furthest(out, tiny_model(1 - seed)) > 1e-2


def test_what_came_while_it_is_stopped_is_drawn_from_the_weights_of_then(config: Any, manager: Any) -> None:
    update(config, tiny_model(0), 3)
    client, replica = manager.get_client(), manager.get_replicas()[0]
    greedy = {"temperature": 0.0, "top_k": -1, "max_tokens": 6, "logprobs": False}

    async def updated() -> Any:
        await replica.abort_all_requests()
        asked = replica.server_handle.generate.remote(
            request_id="a", prompt_ids=[5, 6, 7], sampling_params=greedy
        )
        await asyncio.to_thread(update, config, tiny_model(1), 4)
        await replica.resume_generation()
        return await asked

    done = asyncio.run(updated())
    with torch.no_grad():
        expected = tiny_model(1).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    assert done.token_ids == expected[0, 3:].tolist()
    assert (done.log_probs, done.stop_reason, done.extra_fields["global_steps"]) == (None, "completed", 4)
    again = asyncio.run(client.generate("b", prompt_ids=[5, 6, 7], sampling_params=greedy))
    assert again.token_ids == done.token_ids


def test_what_a_server_cannot_do_is_refused_by_name(config: Any, manager: Any) -> None:
    server = manager.get_replicas()[0].server_handle

    def asked(**changed: Any) -> None:
        request = {"request_id": "a", "prompt_ids": [5], "sampling_params": {}, **changed}
        ray.get(server.generate.remote(**request))

    with pytest.raises(Exception, match="image_data"):
        asked(image_data=["an image"])
    with pytest.raises(Exception, match="guided_json"):
        asked(sampling_params={"guided_json": "{}"})
    with pytest.raises(ValueError, match=r"model\.lora\.merge"):
        update(config, tiny_model(0), 5, peft_config={"r": 4})
    with pytest.raises(ValueError, match="delta_sharded"):
        update(config, tiny_model(0), 5, wire_format="delta_flush")


def test_verls_grpo_trainer_learns_from_our_samples_and_finds_their_log_probabilities_right(
    tmp_path: Path,
) -> None:
    script = ROOT / "tests" / "trainers" / "verl_on_cpu.py"
    told = subprocess.run(
        [sys.executable, str(script), str(write_checkpoint(tmp_path)), "6"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLES, script.parent)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    steps = [line for line in told.stdout.splitlines() if line.startswith("step:")]

    def figures(name: str) -> list[float]:
        return [float(re.search(rf"{name}:(\S+)", line)[1]) for line in steps]  # type: ignore[index]

    assert len(steps) == 6
    assert max(figures("training/rollout_probs_diff_max")) < 1e-5
    rewards = figures("critic/rewards/mean")
    assert rewards[-1] > rewards[0] + 0.1


def test_verl_itself_imports_the_module_that_its_environment_names() -> None:
    code = (
        "import verl; from verl.workers.rollout.base import get_rollout_class\n"
        "print(get_rollout_class('batchbound'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": NAME, "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split("'")[1] == f"{NAME}.ServerAdapter"
