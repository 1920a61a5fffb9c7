"""Models and machines of ExeGPT's Tables 1 and 2: no profile of them is public, so they are estimated."""

from __future__ import annotations

from batchbound.data.costs.link import usual_link
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.models.exegpt.configuration import Cluster
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Roofline
from batchbound.models.iterations.layer_cost import LayerCost


def _decoder(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 50257) -> ModelShape:
    width = hidden // heads
    return ModelShape(
        name, layers, hidden, heads, heads, width, 4 * hidden, vocabulary, gated=False, tied_embedding=True
    )


MACHINES = {
    "opt-13b": (_decoder("OPT 13B", 40, 5120, 40, 50272), "a40", 4),
    "gpt3-39b": (_decoder("GPT-3 39B", 48, 8192, 64), "a40", 16),
    "gpt3-101b": (_decoder("GPT-3 101B", 80, 10240, 80), "a100-80gb", 16),
}
"""Model, device and number of devices, by name."""


def paper_machine(name: str) -> tuple[dict[int, LayerCost], Cluster]:
    """Return estimated costs by tensor-parallel degree, and the devices; machines of 8, one kind of link."""
    shape, device, count = MACHINES[name]
    rates, link = ROOFLINE_DEVICES[device], usual_link(device)
    assert link is not None
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= count]
    costs = {degree: LayerCost(Roofline(shape, rates, degree, link=link).profile()) for degree in degrees}
    cluster = Cluster(count, rates.memory, link_bandwidth=link.bandwidth, link_latency=link.latency)
    return costs, cluster


def measured_machine(folders: list[str], devices: int) -> tuple[dict[int, LayerCost], Cluster]:
    """Return the costs of measured profiles by tensor-parallel degree, and so many of their devices."""
    profiles = [read_layer_profiles(folder) for folder in folders]
    costs = {profile.tensor_parallel: LayerCost(profile) for profile in profiles}
    return costs, Cluster(devices, profiles[0].device_bytes)
