"""Screen of ``batchbound profile``."""

from __future__ import annotations

from ..data.costs.cost import CalibratedCost, CostModel
from ..data.costs.layer_profile import LayerProfile
from ..models.iterations.layer_cost import LayerCost, Surface
from ..options.profile import ProfileOptions
from .streams import say


def show(measured: CalibratedCost | LayerProfile, options: ProfileOptions) -> int:
    """Print the costs, or the layers' times at the grid's corners."""
    if isinstance(measured, CalibratedCost):
        _show_costs(measured, options)
    else:
        say(f"{options.path}: {measured.shape.name} on {measured.device}, {measured.versions['tier']} tier")
        each = f"each measurement is in {options.points_path}"
        say(f"  {each}; {measured.kv_tokens:,} tokens of KV cache would fit")
        say(_layer_table(measured))
    return 0


def _show_costs(measured: CalibratedCost, options: ProfileOptions) -> None:
    cost, error, beyond = measured.cost, measured.error, measured.held_out
    assert error is not None, "it was measured"
    say(f"{options.path}: {measured.engine.get('model')} on {measured.engine.get('device')}")
    say(
        f"  prefill stage  {cost.prefill_base * 1e3:.3f} ms + {cost.prefill_per_token * 1e3:.5f} ms/token"
        f"{_bend(cost)}, at least {cost.prefill_floor * 1e3:.3f} ms  (mean error {error.prefill_mape:.1%})"
    )
    say(
        f"  decode step    {cost.decode_base * 1e3:.3f} ms + {cost.decode_per_slot * 1e3:.5f} ms/slot"
        f" + {cost.decode_per_kv_token * 1e9:.5f} ns/KV token  (mean error {error.decode_mape:.1%})"
    )
    say(f"  change of the batch  {cost.decode_per_change * 1e3:.3f} ms")
    say(
        f"  KV cache       {measured.kv_token_bytes:,.0f} bytes/token,"
        f" {measured.kv_tokens:,} tokens fit with the weights"
    )
    if beyond is not None:
        say(
            f"  on a held-out job: {beyond.makespan:+.1%} of all seconds,"
            f" mean error of a stage {beyond.prefill_mape:.1%}, of a step {beyond.decode_mape:.1%}"
        )


def _bend(cost: CostModel) -> str:
    if not cost.prefill_per_token_beyond:
        return ""
    return f" + {cost.prefill_per_token_beyond * 1e3:.5f} ms/token beyond {cost.prefill_bend:.0f}"


def _layer_table(profile: LayerProfile) -> str:
    """Return the times at the grid's corners, with attention's share."""
    cost, layers = LayerCost(profile), profile.shape.layers
    attention = {
        operation.phase: operation for operation in profile.operations if operation.name == "attention"
    }
    corners = attention["encode"].points
    heads = ("batch", "tokens", "encode", "attention", "decode step", "attention")
    lines = ["  " + " ".join(f"{head:>12s}" for head in heads)]
    for batch in (int(corners[:, 0].min()), int(corners[:, 0].max())):
        for length in (int(corners[:, 1].min()), int(corners[:, 1].max())):
            row = [str(batch), str(length)]
            for phase, (per_layer, once) in (
                ("encode", cost.encode(batch, length)),
                ("decode", cost.decode(batch, length)),
            ):
                seconds, surface = layers * per_layer + once, attention[phase]
                share = layers * Surface(surface.points, surface.seconds)(batch, length) / seconds
                row += [f"{seconds * 1e3:.3f} ms", f"{share:.0%}"]
            lines.append("  " + " ".join(f"{text:>12s}" for text in row))
    return "\n".join(lines)
