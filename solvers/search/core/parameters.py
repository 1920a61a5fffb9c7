"""Tuned values of the compiled searches.

C++ reads the fields in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


def _check(params: object) -> None:
    for parameter in fields(params):  # type: ignore[arg-type]
        value = getattr(params, parameter.name)
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or (
                number == 0 and parameter.name in ("new_stage", "improved")
            ):
                continue
            largest = 1.0 if parameter.name.endswith(("_share", "_shares")) else math.inf
            if not (0 < number <= largest and math.isfinite(number)):
                limit = " and at most 1" if largest == 1.0 else " and finite"
                raise ValueError(f"{parameter.name} is {number!r}; it must be above 0{limit}")


@dataclass(frozen=True, slots=True)
class SpanParameters:
    """Values of the annealing over stage times and spans (``spans.hpp``)."""

    first_share: float = 0.8
    """Share of the limits for annealing everything; then single stages follow."""
    moves_per_request: float = 20_000.0
    """Moves per request in one cooling; longer runs cool again."""
    coldest: float = 0.03
    """Temperature at the end, decode steps."""
    hot_steps: float = 0.45
    """Temperature at the start, decode steps."""
    hot_stages: float = 0.3
    """Further temperature per decode step that a stage costs."""
    full_heat_moves: float = 8000.0
    """Moves per request from which a walk begins at full heat."""
    price_start: float = 1.5
    """Price of a missing step at first, in steps over the slots."""
    price_end_slots: float = 8.0
    """Price of a missing step at the end, in steps over the slots."""
    price_end_least: float = 0.3
    """Least price at the end, decode steps."""
    price_end_most: float = 2.0
    """Largest price at the end, decode steps."""
    price_growth: float = 3.0
    """Exponent of the price's rise; larger rises later."""
    price_slack: float = 1.1
    """Ratio of longest request to mean load from which prices rise."""
    stage_bias: float = 1.25
    """Factor on a stage's price in the walk; larger makes fewer stages."""
    settle_share: float = 0.06
    """Largest share of the time for making schedules of spans."""
    settle_after: float = 0.2
    """Share of a cooling before schedules are made."""
    memory_share: float = 0.94
    """Share of the KV capacity that mean prompts may fill."""
    balance_share: float = 0.98
    """Share of the KV capacity up to which requests trade spans."""
    balance_swaps: float = 200.0
    """Most trades tried per request."""
    balance_points: float = 2048.0
    """Points at which trades check memory, besides the stages."""
    swap_tails: float = 0.43
    """Share of moves that swap the tails of two paths."""
    relocate: float = 0.37
    """Share of moves that move a node to another stage."""
    shift: float = 0.09
    """Share of moves that shift stages."""
    add: float = 0.04
    """Share of moves that merge two spans; the rest splits one."""
    restructure: float = 0.015
    """Largest share of moves that close, and that open, a stage."""
    restructure_slots: float = 0.12
    """The same share, multiplied by the slots, if less."""
    swap_ends: float = 0.1
    """Share of swaps at the end of the job."""
    new_stage: float = 0.1
    """Share of new nodes at a new stage; half as many moved ones."""
    reach_swap: float = 3.0
    """Most stages between two nodes whose tails are swapped."""
    reach_relocate: float = 2.0
    """Most stages that a node moves."""
    later_stages: float = 0.15
    """Largest share of shifts that move all later stages along."""
    later_stages_requests: float = 60.0
    """The same share, multiplied by the requests, if less."""
    shift_spread: float = 0.9
    """Deviation of the logarithm of shifts, in steps."""
    widest_close: float = 64.0
    """Most nodes of a stage that the annealing closes."""
    focus_width: float = 6.0
    """Stages on either side that are annealed after a change."""
    focus_moves_least: float = 150.0
    """Least moves of such an annealing."""
    focus_moves_most: float = 3000.0
    """Most moves of such an annealing."""
    focus_close: float = 0.45
    """Share of these attempts that close a stage."""
    focus_open: float = 0.3
    """Share of these attempts that open one."""
    focus_heat: float = 0.33
    """Temperature of these attempts, as a share of the full one."""
    focus_shift: float = 0.15
    """Share of their shifts that move all later stages along."""
    focus_tolerance: float = 2.0
    """Largest loss of an attempt, in final temperatures."""
    price_step: float = 1.05
    """Factor on the price of missing steps after each attempt."""
    price_most: float = 4.0
    """Largest price of a missing step, decode steps."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class EventParameters:
    """Values of the annealing over orders placed backward (``events.hpp``)."""

    hot: float = 0.005
    """Largest temperature at the start, as a share of the makespan."""
    hot_requests: float = 0.2
    """The same temperature, multiplied by the requests, if less."""
    cold: float = 0.0002
    """Temperature at the end, relative to the start and the makespan."""
    cycle_moves: float = 2000.0
    """Moves per request in one cooling; longer runs cool again."""
    reach_moves: float = 0.2
    """Share of moves that change a request's reach for a stage."""
    reach_none: float = 0.4
    """Share of these after which it joins no stage."""
    reach_short: float = 0.3
    """Share of these with a reach of a few steps."""
    short_reach: float = 4.0
    """Mean of a short reach, in steps."""
    long_reach: float = 0.1
    """Mean of a long reach, as a share of the longest request."""
    far_moves: float = 0.5
    """Share of order changes between any two places."""
    near_distance: float = 4.0
    """Mean distance of the other order changes."""
    swaps: float = 0.5
    """Share of order changes that swap two requests; the rest moves one."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class RuinParameters:
    """Values of ruin and recreate on start times (``ruin_recreate.hpp``)."""

    hot: float = 0.5
    """Temperature at the start, in prices of a stage of one request."""
    cold: float = 0.1
    """Temperature at the end, in the same prices."""
    hottest_step: float = 0.3
    """Least temperature at the start, decode steps."""
    coldest_step: float = 0.02
    """Least temperature at the end, decode steps."""
    charge_start: float = 0.8
    """Price of an omitted request at first, in its share of decode steps."""
    charge_end: float = 3.0
    """Price of an omitted request at the end."""
    force_in: float = 0.3
    """Share of ruins that force an omitted request in."""
    cut: float = 0.15
    """Share of other ruins that shorten the job."""
    cut_requests: float = 150.0
    """Requests beyond which fewer ruins shorten the job."""
    give_up: float = 0.3
    """Share of ruins that give a stage up."""
    shift: float = 0.15
    """Share of ruins that shift a stage."""
    shift_spread: float = 0.9
    """Mean logarithm of such shifts, in steps."""
    most_given_up: float = 18.0
    """Most requests of a stage that is given up."""
    most_out: float = 6.0
    """Most further requests to remove."""
    scattered: float = 0.2
    """Share of ruins that remove requests from anywhere."""
    spread: float = 0.02
    """Mean distance of removed requests from one time, as a share of the job."""
    new_stage: float = 0.1
    """Share of requests that go to a new stage at once."""
    best_fit: float = 0.5
    """Share of requests that take the stage with least room."""
    late_fit: float = 0.2
    """Share of requests that take the last stage with room."""
    window: float = 1.5
    """Mean lengths on either side of a ruin for insertions."""
    windowed: float = 0.85
    """Share of recreations within that window."""
    windowed_stages: float = 40.0
    """Stages up to which recreations look everywhere."""
    tried_out: float = 8.0
    """Most omitted requests that a recreation tries to insert."""
    patience: float = 0.25
    """Share of the time without a complete schedule before a return to the best."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class ExactParameters:
    """Values of the two exact searches (``layers.hpp``, ``stage_states.hpp``, ``end_orders.hpp``)."""

    bytes: float = 2.0**30
    """Memory beyond which a search gives up; larger proves more."""
    beam: float = 300.0
    """States of a layer in the first pass, which finds a schedule."""
    wide_beam: float = 1_000.0
    """States of a layer in the second pass."""
    even: float = 0.2
    """Weight of the remaining work in a beam's choice."""
    width: float = 20_000.0
    """States of a layer in the first pass that can prove."""
    widening: float = 4.0
    """Factor on the states of each later pass."""
    compared: float = 24.0
    """Neighbours to compare a state with; more prune more and take longer."""
    compared_in_beam: float = 4.0
    """States to compare for each that a beam keeps."""
    set_rows: float = 15_000.0
    """Ways to serve sets of one size; more bound better and take longer."""
    tried_placements: float = 60.0
    """Requests to place on slots before the order is given up."""
    improved: float = 100.0
    """Orders to improve whose schedule costs more than their bound."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class CoreParameters:
    """Values of the searches, and their shares of time."""

    spans: SpanParameters = field(default_factory=SpanParameters)
    events: EventParameters = field(default_factory=EventParameters)
    ruin: RuinParameters = field(default_factory=RuinParameters)
    ruin_improves: RuinParameters = field(
        default_factory=lambda: RuinParameters(hot=0.3, cold=0.05, new_stage=0.0)
    )
    """Values of ruin and recreate after spans."""
    exact: ExactParameters = field(default_factory=ExactParameters)
    many_requests: int = 100
    """Requests from which ``many_bias`` applies."""
    most_requests: int = 1000
    """Requests from which ``most_bias`` applies."""
    many_bias: float = 1.5
    """Factor on the price of a stage from ``many_requests`` on."""
    most_bias: float = 2.0
    """Factor from ``most_requests`` on."""
    spans_share: float = 0.9
    """Share of the time for spans if slots bind."""
    spans_curved_share: float = 0.6
    """The same share with a token cap or a bend, if prompts differ."""
    spans_memory_shares: tuple[float, ...] = (0.45, 0.5)
    """Shares of the rest for spans under memory, each filling less of it."""
    memory_step: float = 0.06
    """Share of the KV capacity that the next attempt leaves free."""
    heat_again: float = 0.27
    """Factor on the temperature of the next attempt."""
    events_requests: int = 200
    """Requests up to which orders are placed backward."""
    moves_per_work: int = 20_000
    """Moves of spans per unit of ``Limits.work``."""
    ruins_per_work: int = 1000
    """Ruins per unit of work."""
    placed_per_work: int = 100_000
    """Requests placed in orders per unit of work."""
    most_steps: int = 400_000
    """Most decode steps for searching start times; more take more memory."""

    def __post_init__(self) -> None:
        _check(self)
