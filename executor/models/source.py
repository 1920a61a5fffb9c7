"""Sources of a model: hub name, directory, or tiny random model."""

from __future__ import annotations

import json
import math
import re
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ...data.files.disk import InputError
from .families import check_supported
from .faults import available_bytes
from .tiny import SPELLER, speller_weights, tiny_config, tiny_settings

LoadFormat = Literal["auto", "partial", "dummy"]
"""Weights: ``auto`` reads all, ``partial`` draws missing ones, ``dummy`` draws all."""

_FORMAT_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models without a stated number format."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""Names of position limits in configurations."""


class ModelLoadError(InputError):
    """Error for a model or tokenizer that cannot be loaded."""

    def __init__(self, spec: str, reason: str, hint: str) -> None:
        super().__init__(f"cannot load {spec!r}: {reason}; {hint}")
        self.spec = spec


def require_engine(*, weights: bool = True) -> None:
    """Raise an error if torch or transformers cannot be imported.

    Without weights, transformers will do.
    """
    if sys.flags.optimize >= 2:
        raise ImportError(
            "running a model needs transformers, which does not work without docstrings: leave out -OO, or"
            " unset PYTHONOPTIMIZE"
        )
    try:
        import transformers

        del transformers
        if weights:
            import torch  # takes seconds

            del torch
    except ImportError as error:
        needs = "running a model needs torch and" if weights else "a model's tokenizer and config need"
        raise ImportError(
            f"{needs} transformers ({error}): in the clone, run `pip install '.[engine]'`"
        ) from error


def load_config(spec: str) -> Any:
    """Read a supported model's configuration, without its weights."""
    require_engine(weights=False)
    if spec.startswith("tiny:"):
        config = tiny_config(_tiny_family(spec)[0])
    else:
        from transformers import AutoConfig

        _check_directory(spec, "config.json")
        try:
            config = AutoConfig.from_pretrained(spec)
        except Exception as error:  # whatever the hub client or a damaged file raises
            raise ModelLoadError(spec, first_line(error), _mend(spec)) from error
    check_supported(config)
    return config


def position_limit(config: Any) -> int | None:
    """Return a configuration's position limit, or None."""
    text = config.get_text_config()
    return _first_limit(getattr(text, name, None) for name in _LIMITS)


def positions_of(spec: str) -> int | None:
    """Return a model's position limit, or None.

    It avoids importing torch, which takes seconds, if the directory's config.json suffices.
    """
    if spec.startswith("tiny:"):
        settings = tiny_settings(_tiny_family(spec)[0])[1]
        stated = _first_limit(settings.get(name) for name in _LIMITS)
        if stated is not None:
            return stated
    stated = _plainly_stated(spec)
    return position_limit(load_config(spec)) if stated is None else stated


def _plainly_stated(spec: str) -> int | None:
    """Return the limit in config.json for plain families, else None."""
    file = Path(spec) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None  # reading the whole configuration names the mistake
    if not isinstance(config, dict) or config.get("model_type") not in _PLAIN_FAMILIES:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    usual = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
    special = "auto_map" in config or config.get("use_sliding_window") or not usual
    return None if special else _first_limit(config.get(name) for name in _LIMITS)


_PLAIN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families that are supported in every configuration."""


def _first_limit(values: Iterable[object]) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def load_model(
    spec: str,
    *,
    load_format: LoadFormat = "auto",
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
) -> Any:
    """Load or build a causal language model for evaluation."""
    require_engine()
    config = load_config(spec)
    import torch

    if dtype not in ("auto", "float32", "float64", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, float64, bfloat16 or float16, got {dtype!r}")
    target = _device(spec, device)
    if not spec.startswith("tiny:"):
        _check_memory(spec, config, dtype, drawn=load_format == "dummy")
    if spec.startswith("tiny:") or load_format == "dummy":
        if spec.startswith("tiny:"):
            family = _tiny_family(spec)[1]
            seed = seed if family is None else family
        model = build_random(config, seed=seed, dtype=dtype)
        take_generation_settings(model, spec)
        if spec == f"tiny:{SPELLER}" and load_format != "dummy":
            # The output layer is the embedding in the file.
            model.load_state_dict(speller_weights(), strict=False)
    else:
        model = _checkpoint(spec, dtype, seed, partial=load_format == "partial")
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # The fused kernels for mixtures of experts know no float64.
        model.set_experts_implementation("eager")
    model = model.to(target).eval()
    if dtype == "auto":
        _FORMAT_OPEN.add(model)
    return model


def take_open_format(model: Any) -> bool:
    """Return True once for a model with an open number format."""
    is_open = model in _FORMAT_OPEN
    _FORMAT_OPEN.discard(model)
    return is_open


def _check_memory(spec: str, config: Any, dtype: str, *, drawn: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    # This allocates no weights, only their sizes.
    with torch.device("meta"):
        outline: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    number_format = dtype_of(config, dtype)
    # Random weights are drawn as float32, whatever they become.
    width = max(torch.empty(0, dtype=number_format).element_size(), 4 if drawn else 0)
    needed, free = width * sum(weight.numel() for weight in outline.parameters()), available_bytes()
    if needed > free:
        reason = f"its weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free"
        raise ModelLoadError(spec, reason, "take a machine with more, a narrower --dtype, or a smaller model")


def _checkpoint(spec: str, dtype: str, seed: int, *, partial: bool) -> Any:
    """Return a model with its checkpoint's weights.

    Missing ones are drawn only on request.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                spec, dtype=torch_dtype, output_loading_info=True
            )
    except Exception as error:  # whatever the hub client or a damaged file raises
        raise ModelLoadError(spec, first_line(error), _mend(spec)) from error
    model, report = loaded
    missing = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if missing and not partial:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        hint = "check the checkpoint, or say --load-format partial to have them drawn at random"
        raise ModelLoadError(spec, f"the checkpoint has no weights for {names}", hint)
    return model


def take_generation_settings(model: Any, spec: str) -> None:
    """Give a model the generation settings of its folder."""
    from transformers import GenerationConfig

    if spec.startswith("tiny:") or (
        Path(spec).is_dir() and not Path(spec, "generation_config.json").is_file()
    ):
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(spec)
    except OSError as error:
        if Path(spec).is_dir():
            raise ModelLoadError(spec, first_line(error), "check its generation_config.json") from error
        # A hub model may have none; its configuration then counts.


def build_random(config: Any, *, seed: int, dtype: str = "auto") -> Any:
    """Build a model with seeded random weights, on the CPU.

    The weights are wide enough for varied greedy tokens. With small initial weights as for training, a random
    model tends to repeat one token, which makes comparisons of tokens meaningless.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=1.2 / math.sqrt(parameter.shape[-1]))
    return model.to(dtype_of(config, dtype))


def dtype_of(config: Any, dtype: str) -> Any:
    """Return a number format by name; ``auto`` takes the configuration's."""
    import torch

    return (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def _tiny_family(spec: str) -> tuple[str, int | None]:
    parts = spec.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch(r"\d{1,18}", parts[2])):
        raise ModelLoadError(
            spec, "it is not tiny:FAMILY or tiny:FAMILY:SEED", "write for example tiny:llama:0"
        )
    if parts[1:2] == [SPELLER] and len(parts) == 3:
        raise ModelLoadError(spec, "its weights are trained, no seed draws them", f"write tiny:{SPELLER}")
    return parts[1], int(parts[2]) if len(parts) == 3 else None


def _check_directory(spec: str, needed: str) -> None:
    """Refuse a path without a model; accept a hub name."""
    path = Path(spec)
    if path.is_dir() and not (path / needed).is_file():
        if (path / "adapter_config.json").is_file():
            hint = "merge it (merge_and_unload) and save that, or give LLM the PEFT model"
            raise ModelLoadError(spec, "the directory holds a PEFT adapter, not a model", hint)
        raise ModelLoadError(spec, f"the directory has no {needed}", "name one written by save_pretrained")
    refuse_missing(spec)


def refuse_missing(spec: str) -> None:
    """Refuse a missing directory without asking the hub."""
    path = Path(spec)
    if not path.exists() and (path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1):
        raise ModelLoadError(spec, "there is no such directory", "check the path")


def _mend(spec: str) -> str:
    if Path(spec).is_dir():
        return "check the directory's files"
    return "check the name and the network, or name a local directory or tiny:FAMILY"


def first_line(error: Exception) -> str:
    """Return the first line of another library's error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _device(spec: str, device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise ModelLoadError(spec, f"{device!r} is no device", "use cpu, cuda, cuda:N or auto")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(
            spec, f"device {device!r} was asked for and there is no CUDA device", "use --device cpu"
        )
    return device
