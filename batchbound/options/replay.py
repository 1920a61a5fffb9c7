"""Options of ``batchbound replay``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ..data.files.kinds import is_of_kind
from ..data.iteration_plan import KIND
from ..heuristics.serving.published import PUBLISHED
from .option import Option, PathText, Rule, everyday, option
from .plan import ObjectiveOptions
from .values import File, SlotCount, TokenCount

SEARCH = "search"
"""Name of the search among the policies."""


@dataclass(frozen=True)
class ReplayOptions(ObjectiveOptions):
    """An instance, the server, and the order of the requests."""

    TITLE = ""
    RULES = (Rule(("objective",), when=lambda options: options.is_plan, where="with a plan: it has its own"),)

    instance: Annotated[
        PathText,
        Option(
            "a plan of `plan --for`, or a table or generator of lengths, such as sharegpt:0:200",
            positional=True,
            metavar="INSTANCE",
        ),
    ]
    _: KW_ONLY
    server: Annotated[str, Option("address of a vLLM or SGLang server", metavar="URL", everyday=True)]
    policy: str | None = everyday(
        None,
        "order of the requests: a published one, or search (default: the plan's order, else first-come)",
        choices=(*PUBLISHED, SEARCH),
    )
    slots: SlotCount | None = everyday(None, "slots of the server, max_num_seqs (default: the plan's)")
    token_budget: TokenCount | None = option(
        None,
        "maximum tokens per iteration, max_num_batched_tokens (default: the plan's, else 2048 simulated)",
    )
    kv_capacity: TokenCount | None = option(
        None, "KV capacity of the server in tokens (default: as it tells, else the plan's)"
    )
    model: str | None = option(None, "model of the server to name (default: the first that it lists)")
    output: File = everyday(
        "replay.json", "file of the replay, for `verify` (default %(default)s)", short="-o", writes=True
    )
    overwrite: bool = everyday(False, "replace the output if it exists")
    json: bool = everyday(False, "print one JSON object instead of a table")

    @property
    def is_plan(self) -> bool:
        """True for a file of a plan for servers."""
        return is_of_kind(self.instance, KIND)
