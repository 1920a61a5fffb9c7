"""Options of a model and its loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..listening import hushed
from .option import Option, Options, option
from .values import Positive, Seed

if TYPE_CHECKING:
    from ..executor.engines.tiers import Tier
    from ..executor.jobs.job import Job
    from ..executor.processes.engine_spec import EngineSpec


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Options):
    """How a model is loaded."""

    TITLE = "model"

    load_format: Literal["auto", "partial", "dummy"] = option(
        "auto", "weights to load; partial: random weights if missing in the checkpoint; dummy: all random"
    )
    dtype: str = option(
        "auto", "data type of the weights", choices=("auto", "float32", "float64", "bfloat16", "float16")
    )
    device: str = option("auto", "device: cpu, cuda, cuda:N or auto (default %(default)s)")
    threads: Positive | None = option(None, "CPU threads of torch (default: torch's own)")
    seed: Seed | None = option(None, "seed of sampling and of random weights (default 0)")
    tier: str = option(
        "auto",
        "layout of the KV cache (default: the fastest that reproduces this model's completions)",
        choices=("auto", "window", "ragged"),
    )


@dataclass(frozen=True)
class ModelOptions(LoadingOptions):
    """A model and its loading."""

    model: Annotated[str, Option("hub name, directory or tiny:FAMILY[:SEED]", everyday=True, metavar="MODEL")]

    def load(self) -> Any:
        """Load the model."""
        from ..executor.models.source import load_model, require_engine

        require_engine()
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        with hushed():
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
