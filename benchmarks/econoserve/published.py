"""The paper's figures that ours are printed beside; averages of its three traces."""

from __future__ import annotations

import math
from collections.abc import Iterator

MORE, LESS = math.inf, 0.0
"""Where the paper orders two systems without a number."""

SLOWER = {"completion": MORE, "tokens_per_s": LESS}
FASTER = {"completion": LESS, "tokens_per_s": MORE, "requests_per_s": MORE}

KNOWN = {
    ("orca", "vllm"): SLOWER,
    ("srtf", "vllm"): SLOWER,
    ("fastserve", "vllm"): SLOWER,
    ("vllm", "sarathi"): {"completion": 1.29, "tokens_per_s": 0.59, "kv_held": 1.20, "forward_size": 0.73},
    ("multires", "vllm"): {"completion": 0.5737},
    ("multires", "sarathi"): {"completion": 0.65, "tokens_per_s": 1.10},
    ("econoserve-sd", "sync-coupled"): {"completion": 0.647, "tokens_per_s": 1.31},
    ("econoserve-sd", "distserve"): {"completion": 0.91, "tokens_per_s": 1.07},
}
"""Figures of the first system over the second's, lengths known (section 2.2)."""

PREDICTED = {
    ("econoserve", "orca*"): FASTER,
    ("econoserve", "vllm*"): FASTER,
    ("econoserve", "sarathi*"): FASTER,
    ("econoserve", "distserve*"): FASTER,
    ("econoserve-d", "econoserve"): {"completion": 1.19, "tokens_per_s": 0.64, "slo_satisfaction": 0.84},
    ("econoserve-sd", "econoserve"): {"completion": 1.07, "tokens_per_s": 0.83, "slo_satisfaction": 0.79},
    ("econoserve-sdo", "econoserve"): {"completion": 1.29, "tokens_per_s": 0.38, "slo_satisfaction": 0.83},
}
"""The same with EconoServe's lengths predicted (section 4); what needs no lengths has a star."""

SATISFACTION = {
    # EconoServe's SLO satisfaction over each system's, by model.
    "opt-13b": {"orca*": 1.93, "vllm*": 1.83, "sarathi*": 1.42, "distserve*": 1.05, "oracle": 0.98},
    "llama-33b": {"orca*": 1.91, "vllm*": 1.80, "sarathi*": 1.41, "distserve*": 1.07, "oracle": 0.96},
    "opt-175b": {"orca*": 2.06, "vllm*": 1.77, "sarathi*": 1.47, "distserve*": 1.09, "oracle": 0.972},
}

RATES = {
    "opt-13b": {
        "orca": (3.5, 25.0),
        "vllm": (1.28, 2.33),
        "sarathi": (1.20, 2.33),
        "distserve": (1.01, 1.33),
    },
    "llama-33b": {"orca": (3.0, 64.0), "vllm": (2.4, 4.0), "sarathi": (1.2, 2.18), "distserve": (1.01, 1.33)},
    "opt-175b": {"orca": (2.8, 22.0), "vllm": (1.28, 2.0), "sarathi": (1.20, 2.25), "distserve": (1.2, 1.5)},
}
"""EconoServe's sustained rate over each system's: the least and the most of the three traces (Figure 9)."""

SWEET_SPOTS = {
    "padding": {"alpaca": 0.10, "sharegpt": 0.15, "bookcorpus": 0.20},
    "reserved": {"alpaca": 0.02, "sharegpt": 0.03, "bookcorpus": 0.04},
    "buffer": {"alpaca": 0.15, "sharegpt": 0.15, "bookcorpus": 0.10},
}
"""Figure 15."""


def ratios(model: str, system: str) -> Iterator[tuple[str, str, str, float]]:
    """
    Yield the system over, the system under, the figure and its ratio; a star where lengths are known.

    ``system`` stands for the paper's EconoServe.
    """
    for (over, under), figures in KNOWN.items():
        yield from ((f"{over}*", f"{under}*", figure, ratio) for figure, ratio in figures.items())
    for (over, under), figures in PREDICTED.items():
        first, second = (system if name == "econoserve" else name for name in (over, under))
        yield from ((first, second, figure, ratio) for figure, ratio in figures.items())
    for under, ratio in SATISFACTION.get(model, SATISFACTION["opt-13b"]).items():
        told = "pipelined-oracle" if (system, under) == ("pipelined", "oracle") else under
        yield system, told, "slo_satisfaction", ratio
