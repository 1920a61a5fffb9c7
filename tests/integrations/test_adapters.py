"""Adapters: the order they give, against the engines' own classes where those are installed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchbound.integrations.verl import Placement, planned_load_balancer, priorities, set_priorities
from batchbound.integrations.vllm import LongestFirstQueue, expected_tokens


def request(name: str, tokens: int, **extra: object) -> SimpleNamespace:
    params = SimpleNamespace(extra_args=extra or None)
    return SimpleNamespace(request_id=name, max_tokens=tokens, sampling_params=params)


def names(queue: LongestFirstQueue) -> list[str]:
    return [one.request_id for one in queue]


def test_importing_an_adapter_imports_no_engine() -> None:
    code = (
        "import sys, batchbound.integrations.vllm, batchbound.integrations.verl,"
        " batchbound.integrations.transformers\n"
        "print([name for name in ('vllm', 'verl', 'transformers', 'torch', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_requests_wait_longest_first_in_vllm_and_those_put_back_go_on_first() -> None:
    queue = LongestFirstQueue()
    for one in (request("a", 5), request("b", 9), request("c", 5), request("d", 99, expected_tokens=7)):
        queue.add_request(one)
    assert names(queue) == ["b", "d", "a", "c"]
    assert queue.peek_request().request_id == "b"
    first = queue.pop_request()
    queue.prepend_request(queue.pop_request())
    queue.prepend_requests([request("x", 1), first])
    assert names(queue) == ["b", "x", "d", "a", "c"]
    queue.remove_requests([first, queue._heap[0][2]])
    assert names(queue) == ["x", "d", "c"]
    assert len(queue) == 3
    assert [queue.pop_request().request_id for _ in range(3)] == ["x", "d", "c"]
    assert not queue
    with pytest.raises(IndexError):
        queue.pop_request()


def test_a_length_that_is_none_is_not_taken() -> None:
    assert expected_tokens(request("a", 8, expected_tokens=0)) == 8
    assert expected_tokens(request("a", 8, expected_tokens="x")) == 8
    assert expected_tokens(request("a", 8, other=3)) == 8
    for beyond in (float("inf"), 10**400, 9):
        assert expected_tokens(request("a", 8, expected_tokens=beyond)) == 8


def test_transformers_begins_the_longest_waiting_request_first() -> None:
    torch = pytest.importorskip("torch", reason="the engine extra is not installed")
    transformers = pytest.importorskip("transformers")
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

    from batchbound.integrations.transformers import register_longest_first

    lengths = [3, 12, 4, 9, 2, 5]
    name = register_longest_first({f"req_{k}": tokens for k, tokens in enumerate(lengths)})
    kept: list[str] = []

    longest_first: Any = SCHEDULER_MAPPING[name]

    class Watched(longest_first):  # type: ignore[misc]
        def schedule_batch(self, *given: Any) -> Any:
            found = super().schedule_batch(*given)
            kept.extend(one for one in self.active_requests if one not in kept)
            return found

    SCHEDULER_MAPPING["watched"] = Watched
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    try:
        outputs = model.generate_batch(
            inputs=[[5 + k, 6, 7] for k in range(len(lengths))],
            generation_config=transformers.GenerationConfig(
                max_new_tokens=4, do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                scheduler_type="watched", max_requests_per_batch=2, num_blocks=16, max_batch_tokens=32
            ),
            progress_bar=False,
        )
    finally:
        del SCHEDULER_MAPPING["watched"], SCHEDULER_MAPPING[name]
    assert len(outputs) == len(lengths)
    assert kept == ["req_1", "req_3", "req_5", "req_2", "req_0", "req_4"]


def test_priorities_of_verl_begin_at_one_with_the_longest() -> None:
    assert priorities([5, 9, 9, 1]).tolist() == [3, 1, 2, 4]


class Batch:
    """What is used of verl's ``DataProto``."""

    def __init__(self, rows: int) -> None:
        self.rows, self.non_tensor_batch = rows, dict[str, Any]()

    def __len__(self) -> int:
        return self.rows


def test_a_batch_of_verl_has_its_column_before_verl_fills_it() -> None:
    batch = Batch(3)
    set_priorities(batch, priorities([1, 5, 3]))
    column = batch.non_tensor_batch["priority"]
    assert column.dtype == np.int64
    assert column.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="2 priorities for 3 rows"):
        set_priorities(batch, [1, 2])
    with pytest.raises(ValueError, match="verl drops priority 0"):
        set_priorities(batch, [0, 1, 2])


class PublishedBalancer:
    """verl's load balancer as its signature was published: sticky by request, else least in flight."""

    def __init__(
        self, servers: dict[str, object], max_cache_size: int = 10000, full_determinism: bool = False
    ) -> None:
        self._servers = dict(servers)
        self._inflight_requests = dict.fromkeys(servers, 0)
        self._request_id_to_server: dict[str, str] = {}

    def acquire_server(self, request_id: str) -> tuple[str, object]:
        server = self._request_id_to_server.get(request_id)
        if server not in self._inflight_requests:
            server = min(self._inflight_requests, key=self._inflight_requests.__getitem__)
            self._request_id_to_server[request_id] = server
        assert server is not None
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._inflight_requests[server_id] -= 1

    def require_acquire_fields(self) -> list[str]:
        return []


@pytest.fixture(params=[PublishedBalancer, None], ids=["published", "installed"])
def base(request: pytest.FixtureRequest) -> type | None:
    """The class as it was published, or that of the verl that is installed."""
    if request.param is None:
        pytest.importorskip("verl", reason="verl is not installed")
    return request.param  # type: ignore[no-any-return]


def test_verl_sends_each_completion_to_its_replica_and_the_rest_where_it_likes(base: type | None) -> None:
    placement = Placement([[1, 2], [1, 2], [3]], [1, 0, 1])
    balancer = planned_load_balancer(placement, base)({"s0": "A", "s1": "B"})
    assert balancer.require_acquire_fields() == ["prompt_ids"]
    assert balancer.acquire_server("u", prompt_ids=[1, 2]) == ("s1", "B")
    assert balancer.acquire_server("v", prompt_ids=[1, 2]) == ("s0", "A")
    # The next turn of a conversation stays where it was, and takes nobody's place.
    assert balancer.acquire_server("u", prompt_ids=[1, 2]) == ("s1", "B")
    assert balancer.acquire_server("w", prompt_ids=[3]) == ("s1", "B")
    # Not planned: least in flight.
    assert balancer.acquire_server("x", prompt_ids=[9]) == ("s0", "A")
    balancer.release_server("s0")
    assert balancer.acquire_server("y") == ("s0", "A")


def test_a_replica_that_is_not_there_is_left_to_verl(base: type | None) -> None:
    balancer = planned_load_balancer(Placement([[1]], [5]), base)({"s0": "A"})
    assert balancer.acquire_server("u", prompt_ids=[1]) == ("s0", "A")
