"""Choice of a model's KV cache layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..models.families import UnsupportedModelError
from ..models.tiny import FAMILIES
from ..models.wrapped import Evaluation, unwrapped

if TYPE_CHECKING:
    from ..kv.batch import RunningBatch

TierName = Literal["auto", "window", "ragged"]
TIER_NAMES: tuple[TierName, ...] = ("auto", "window", "ragged")

_TESTED_RELEASES = range(17, 25)
"""Minor releases of transformers 5 with tests of every family."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Layout of the KV cache, and the reason of its choice.

    name: ``window`` or ``ragged``.
    check: Check that covers its completions.
    """

    name: str
    reason: str
    check: str

    @property
    def batch(self) -> type[RunningBatch]:
        """The class of its running batch."""
        from ..kv.ragged import RaggedBatch
        from ..kv.window_batch import WindowBatch

        tiers: tuple[type[RunningBatch], ...] = (WindowBatch, RaggedBatch)
        return next(tier for tier in tiers if tier.tier == self.name)


def choose_tier(model: Any, wanted: str = "auto", *, self_check: bool | None = None) -> Tier:
    """Choose the tier that a model runs on.

    Static rules refuse models that a tier is known to get wrong. A few requests run through the tier and are
    compared with the model alone in three cases: an untested family or release, a wrapped model, or a
    replaced forward call.
    """
    if wanted not in TIER_NAMES:
        raise ValueError(f"tier must be one of {', '.join(TIER_NAMES)}, got {wanted!r}")
    if self_check is None:
        self_check = not _known(model)
    if wanted != "auto":
        return _checked(model, Tier(wanted, "asked for", ""), self_check)
    try:
        return _checked(model, Tier("ragged", "the fastest that is right for this model", ""), self_check)
    except UnsupportedModelError as error:
        return _checked(model, Tier("window", f"ragged was refused: {error.reason}", ""), self_check)


def _checked(model: Any, tier: Tier, self_check: bool) -> Tier:
    from .self_check import check_tier

    inner = unwrapped(model)
    tier.batch.check(inner.config)
    if not self_check:
        return Tier(tier.name, tier.reason, "a tested family")
    with Evaluation(model)():
        check_tier(inner, tier.batch, alone=getattr(model, "_orig_mod", model))
    return Tier(tier.name, tier.reason, "completions compared with the model's own at load")


def _known(model: Any) -> bool:
    """Return whether the forward call is a tested family's own."""
    inner = unwrapped(model)
    own = type(inner).__module__.startswith("transformers.models.") and "forward" not in vars(inner)
    return inner is getattr(model, "_orig_mod", model) and own and _tested(inner.config)


def _tested(config: Any) -> bool:
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    families = {model_type for model_type, _ in FAMILIES.values()}
    return major == 5 and minor in _TESTED_RELEASES and config.model_type in families
