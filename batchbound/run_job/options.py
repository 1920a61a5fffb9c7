"""Options of a run on a model: sampling, workers, parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..executor.jobs.params import RunParams
from ..heuristics.registry import POLICIES
from ..options.model import ModelOptions as ModelOptions
from ..options.option import Options, PathText, everyday, option
from ..options.values import AtLeastZero, File, Name, Positive


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """Tokens of completions; by default each request's own sampling, else greedy."""

    TITLE = "completions"

    pinned: bool = option(
        False,
        "decode every completion to its planned length, instead of to an end-of-sequence token or max_tokens",
    )
    temperature: AtLeastZero | None = everyday(
        None,
        "sampling temperature; 0 is greedy (default: the batch file's, else the model's, else 0; a server has"
        " its own)",
    )
    top_p: float | None = option(None, "probability mass to sample from (default: the batch file's, else 1)")
    top_k: int | None = option(
        None, "most likely tokens to sample from (default: the batch file's, else all)"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions):
    """Options of a run on a model. The plan gives defaults."""

    TITLE = ""

    prompts: File | None = option(None, "file of the planned prompts, if moved")
    tokenizer: Name | None = option(None, "tokenizer (default: the one that counted the plan's prompts)")
    any_model: bool = option(False, "run every request on the loaded model, whatever model it names")
    adapters: Mapping[str, PathText] = option(
        {},
        "LoRA adapter in PEFT's format, for requests whose model is NAME; may be repeated",
        metavar="NAME=DIR",
        flag="adapter",
        words="append",
        parse=lambda text: _adapter(text),
    )
    kv_tokens: Positive | None = option(
        None,
        "KV capacity of the device in tokens; the rest is offloaded to the host (default: no limit)."
        " With --server: KV capacity of each engine, for models without sliding windows (default: the plan's;"
        " the server's own if --model is a folder whose config has no windows)",
    )
    policy: str | None = option(
        None,
        "serve requests by this policy as they arrive, instead of the plan's schedule; `simulate --help`"
        " lists them",
        metavar="NAME",
        choices=tuple(sorted(POLICIES)),
    )
    replicas: Positive | None = option(
        None, "number of engines, each a Ray actor (default: as many as the plan is for)"
    )
    ray_address: str | None = option(
        None, "address of a Ray cluster (default: this machine)", metavar="ADDRESS"
    )
    encode_device: str | None = option(
        None,
        "device of the worker that encodes, for a WAA plan of `search` (default: that of --device)",
        metavar="DEVICE",
    )
    replan: PathText | None = option(
        None,
        "search again when lengths drift from the planned ones, with the layer profile that the plan of"
        " `search` was made with",
        metavar="PROFILE",
    )
    tensor_parallel: Positive = option(
        1, "tensor-parallel processes, for an RRA plan of `search` (default: 1)"
    )
    params: File | RunParams | None = option(
        None, "TOML file whose table [run] tunes journal, watchdog and retries"
    )
    on_error: Literal["stop", "record"] | None = option(
        None,
        "if a request fails (logits that are not finite) or cannot be served (too long, unknown token):"
        " stop the run, or record an error as its completion, serve the others and exit with 1 (default:"
        " record)",
    )
    patience: float | None = None
    """Seconds of silence until a replica is abandoned if another lives; by default never."""

    cut_cap: int | None = None
    """Cap under which a finished run's cut completions are completed again; None to repeat none."""

    late_cap: int | None = None
    """Cap of the completions that a stopped run without one has left; None for none."""

    @property
    def tuned(self) -> RunParams:
        """Parameters, read from a file if one is named."""
        return params_of(self.params)

    def files(self) -> Iterator[Path]:
        """Yield the files that a run with these options reads."""
        for name in (self.prompts, self.tokenizer, self.replan, file_of(self.params)):
            if name is not None and Path(name).is_file():
                yield Path(name)


def _adapter(text: str) -> tuple[str, str]:
    name, sign, folder = text.partition("=")
    if not (name and sign and folder):
        raise ValueError(f"{text!r} is not NAME=DIR")
    return name, folder


def params_of(given: RunParams | str | os.PathLike[str] | None) -> RunParams:
    """Return the parameters, by default or from a TOML file."""
    if isinstance(given, RunParams):
        return given
    return RunParams() if given is None else RunParams.from_file(given)


def file_of(given: RunParams | str | os.PathLike[str] | None) -> str | None:
    """Return the name of a file of parameters, or None."""
    return None if given is None or isinstance(given, RunParams) else os.fspath(given)
