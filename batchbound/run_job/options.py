"""Options of a run: the model and its loading, sampling, workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..data.problem import limit_of
from ..executor.jobs.params import RunParams

if TYPE_CHECKING:
    from ..executor.engines.tiers import Tier
    from ..executor.jobs.job import Job
    from ..executor.processes.engine_spec import EngineSpec


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model and its loading.

    Parameters
    ----------
    model
        Hub name, directory or ``tiny:FAMILY[:SEED]``.
    load_format
        ``"auto"``; ``"partial"``: random weights if missing in the checkpoint; ``"dummy"``: all random.
    dtype
        ``"auto"``, ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
    threads
        CPU threads of torch; by default torch's own number.
    seed
        Seed of sampling and random weights; by default each request's own, else 0.
    tier
        Layout of the KV cache: ``"auto"``, ``"window"`` or ``"ragged"``.

    Raises
    ------
    ValueError
        If a number is out of range, or a choice is unknown.
    """

    model: str
    load_format: Literal["auto", "partial", "dummy"] = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int | None = None
    tier: str = "auto"

    def __post_init__(self) -> None:
        _take_plain(self, ("threads",), load_format=("auto", "partial", "dummy"))

    def load(self) -> Any:
        """Load the model."""
        from ..executor.models.source import load_model, require_engine

        require_engine()
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        return load_model(
            self.model,
            load_format=self.load_format,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed or 0,
        )

    def tier_of(self, model: Any) -> Tier:
        """Return the layout of the KV cache, checked on the loaded model."""
        from ..executor.engines.tiers import choose_tier

        return choose_tier(model, self.tier)

    def spec(self, job: Job) -> EngineSpec:
        """Return the specification for another process to run a job."""
        from ..executor.processes.engine_spec import EngineSpec

        return EngineSpec(
            model=self.model,
            load_format=self.load_format,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed or 0,
            tier=self.tier,
            eos_ids=tuple(sorted(job.decoding.eos_ids)),
            sampler=job.sampler,
            threads=self.threads or 1,
        )

    def shape(self) -> Any:
        """Load the model without weights, for its vocabulary and positions."""
        from ..executor.models.source import dtype_of, load_config, take_generation_settings

        config = load_config(self.model)
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(config, self.dtype))  # type: ignore[no-untyped-call]
        take_generation_settings(model, self.model)
        return model


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run on a model. The plan gives defaults.

    Parameters
    ----------
    prompts
        File of the planned prompts, if moved.
    tokenizer
        Tokenizer; by default the one that counted the plan's prompts.
    pinned
        True to decode every completion to its planned length, whatever its tokens are.
    temperature, top_p, top_k
        Sampling for all requests; by default each request's own, else greedy.
    kv_tokens
        KV capacity of the device in tokens; the rest is offloaded to the host.
    policy
        Policy that serves requests as they arrive, instead of the plan's schedule.
    on_error
        Action if a request fails or cannot be served: ``"stop"`` the run, or ``"record"`` (the default) an
        error as its completion.
    replicas
        Number of engines, each a Ray actor; by default that of the plan.
    ray_address
        Address of a Ray cluster; by default this machine.
    patience
        Seconds of silence until a replica is abandoned if another lives; by default never.
    encode_device
        Device of the encoding worker, for a plan of WAA.
    replan
        Layer profile to change the configuration of a plan of ``search`` when lengths drift.
    tensor_parallel
        Tensor-parallel processes, for an RRA plan of ``search``.
    params
        Parameters that tune the run, or a TOML file of them.
    any_model
        True to run every request on the loaded model, whatever model it names, adapters excepted.
    adapters
        Folders of LoRA adapters, by the ``model`` of a request.

    Raises
    ------
    ValueError
        If a number is out of range, or ``on_error`` is unknown.
    """

    prompts: str | None = None
    tokenizer: str | None = None
    pinned: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    kv_tokens: int | None = None
    policy: str | None = None
    on_error: Literal["stop", "record"] | None = None
    replicas: int | None = None
    ray_address: str | None = None
    patience: float | None = None
    encode_device: str | None = None
    replan: str | None = None
    tensor_parallel: int = 1
    params: RunParams | str | os.PathLike[str] | None = None
    any_model: bool = False
    adapters: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _take_plain(self, ("kv_tokens", "replicas", "tensor_parallel"), on_error=(None, "stop", "record"))

    @property
    def tuned(self) -> RunParams:
        """Parameters, read from a file if one is named."""
        return params_of(self.params)

    def files(self) -> Iterator[Path]:
        """Yield the files that a run with these options reads."""
        for name in (self.prompts, self.tokenizer, self.replan, file_of(self.params)):
            if name is not None and Path(name).is_file():
                yield Path(name)


def params_of(given: RunParams | str | os.PathLike[str] | None) -> RunParams:
    """Return the parameters, by default or from a TOML file."""
    if isinstance(given, RunParams):
        return given
    return RunParams() if given is None else RunParams.from_file(given)


def file_of(given: RunParams | str | os.PathLike[str] | None) -> str | None:
    """Return the name of a file of parameters, or None."""
    return None if given is None or isinstance(given, RunParams) else os.fspath(given)


def _take_plain(options: Any, counts: Sequence[str], **choices: Sequence[str | None]) -> None:
    """Convert paths and numpy numbers, and check values."""
    for each in fields(options):
        value = getattr(options, each.name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, np.generic):
            value = value.item()
        if value is not None and each.name in counts:
            value = limit_of(each.name, value, 1)
        object.__setattr__(options, each.name, value)
    for name, known in choices.items():
        if getattr(options, name) not in known:
            choices_known = ", ".join(one for one in known if one is not None)
            raise ValueError(f"{name} is {getattr(options, name)!r}; it must be one of {choices_known}")
