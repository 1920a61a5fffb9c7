"""Tuned values of the compiled searches. C++ reads the fields in their order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


def _check(params: object) -> None:
    """Raise ValueError unless every number is finite and above 0, and every share of time at most 1."""
    for each in fields(params):  # type: ignore[arg-type]
        value = getattr(params, each.name)
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or (number == 0 and each.name == "new_stage"):
                continue
            most = 1.0 if each.name.endswith(("_share", "_shares")) else math.inf
            if not (0 < number <= most and math.isfinite(number)):
                limit = " and at most 1" if most == 1.0 else ""
                raise ValueError(f"{each.name} is {number!r}; it must be above 0{limit}")


@dataclass(frozen=True, slots=True)
class SpanParameters:
    """Values of the annealing over stage times and spans (``spans.hpp``)."""

    first_share: float = 0.8
    """Share of the limits that the annealing of everything takes; the rest improves stage by stage."""
    moves_per_request: float = 20_000.0
    """Moves a request in one cooling; with more the annealing goes in cycles."""
    coldest: float = 0.03
    """Temperature at the end, decode steps."""
    hot_steps: float = 0.45
    """Temperature at the start, decode steps."""
    hot_stages: float = 0.3
    """What is added to it for each decode step that a stage of one request costs."""
    full_heat_moves: float = 8000.0
    """Moves a request from which a walk begins at full heat; with fewer it begins colder."""
    price_start: float = 1.5
    """Price of a missing step at first, in steps over the slots."""
    price_end_slots: float = 8.0
    """Price of a missing step at the end, in steps over the slots."""
    price_end_least: float = 0.3
    """Least price at the end, decode steps."""
    price_end_most: float = 2.0
    """Largest price at the end, decode steps."""
    price_growth: float = 3.0
    """Power of the share done by which the price rises; larger: later."""
    price_slack: float = 1.1
    """Factor of the longest request over the work of a slot from which prices rise."""
    stage_bias: float = 1.25
    """Factor on the price of a stage in the walk; larger: fewer stages."""
    settle_share: float = 0.06
    """Largest share of the time spent on making schedules of spans."""
    settle_after: float = 0.2
    """Share of a cooling after which schedules are made."""
    memory_share: float = 0.94
    """Share of the KV capacity that mean prompts may fill."""
    balance_share: float = 0.98
    """Share of the KV capacity up to which requests trade spans."""
    balance_swaps: float = 200.0
    """Most trades tried a request."""
    balance_points: float = 2048.0
    """Evenly spaced points at which trades look at memory, besides the stages."""
    swap_tails: float = 0.43
    """Share of moves that swap the tails of two paths."""
    relocate: float = 0.37
    """Share of moves that move a node to another stage."""
    shift: float = 0.09
    """Share of moves that shift stages."""
    add: float = 0.04
    """Share of moves that make two spans of one; the rest makes one of two."""
    restructure: float = 0.015
    """Largest share of moves that close a stage, and of those that open one."""
    restructure_slots: float = 0.12
    """That share times the slots, where it is less."""
    swap_ends: float = 0.1
    """Share of swaps at the end of the job."""
    new_stage: float = 0.1
    """Share of new nodes at a new stage; half of it of nodes moved."""
    reach_swap: float = 3.0
    """Stages between two nodes whose tails are swapped, at most."""
    reach_relocate: float = 2.0
    """Stages that a node moves, at most."""
    later_stages: float = 0.15
    """Largest share of shifts that take all later stages along."""
    later_stages_requests: float = 60.0
    """That share times the requests, where it is less."""
    shift_spread: float = 0.9
    """Deviation of the logarithm of shifts in steps."""
    widest_close: float = 64.0
    """Nodes up to which a stage is closed in the annealing of everything."""
    focus_width: float = 6.0
    """Stages on either side that are annealed after one is closed or opened."""
    focus_moves_least: float = 150.0
    """Least moves of that."""
    focus_moves_most: float = 3000.0
    """Most moves of that."""
    focus_close: float = 0.45
    """Share of attempts that close a stage."""
    focus_open: float = 0.3
    """Share of attempts that open one."""
    focus_heat: float = 0.33
    """Temperature of attempts, as a share of the full one."""
    focus_shift: float = 0.15
    """Share of shifts in attempts that take all later stages along."""
    focus_tolerance: float = 2.0
    """Largest loss of an attempt, in coldest temperatures."""
    price_step: float = 1.05
    """Factor on the price of missing steps with each attempt, while any is missing."""
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
    """That temperature times the requests, where it is less."""
    cold: float = 0.0002
    """Temperature at the end, relative to that at the start and the makespan."""
    cycle_moves: float = 2000.0
    """Moves a request in one cooling; with more the annealing goes in cycles."""
    reach_moves: float = 0.2
    """Share of moves that change how far a request goes to join a stage."""
    reach_none: float = 0.4
    """Share of those after which it joins none."""
    reach_short: float = 0.3
    """Share of those after which it goes a few steps."""
    short_reach: float = 4.0
    """Mean of a few steps."""
    long_reach: float = 0.1
    """Mean of many, as a share of the longest request."""
    far_moves: float = 0.5
    """Share of changes of the order between any two places."""
    near_distance: float = 4.0
    """Mean distance of the others."""
    swaps: float = 0.5
    """Share of changes that swap two requests; the rest moves one."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class RuinParameters:
    """Values of ruin and recreate on start times (``ruin_recreate.hpp``)."""

    hot: float = 0.5
    """Temperature at the start, in prices of a stage of one request."""
    cold: float = 0.1
    """Temperature at the end, likewise."""
    hottest_step: float = 0.3
    """Least temperature at the start, decode steps."""
    coldest_step: float = 0.02
    """Least temperature at the end, decode steps."""
    charge_start: float = 0.8
    """Price of a request left out, at first, in the decode steps of its share of slots or memory."""
    charge_end: float = 3.0
    """That price at the end."""
    force_in: float = 0.3
    """Share of ruins that force in a request left out, while there are any."""
    cut: float = 0.15
    """Share of the others that make the job shorter."""
    cut_requests: float = 150.0
    """Requests beyond which fewer do: a cut concerns all of them."""
    give_up: float = 0.3
    """Share that gives up a stage."""
    shift: float = 0.15
    """Share that shifts a stage."""
    shift_spread: float = 0.9
    """Mean logarithm of such shifts, in steps."""
    most_given_up: float = 18.0
    """Requests up to which a stage is given up."""
    most_out: float = 6.0
    """Requests taken out besides, at most."""
    scattered: float = 0.2
    """Share of ruins that take them from anywhere."""
    spread: float = 0.02
    """Mean distance of the others from one time, as a share of the job."""
    new_stage: float = 0.1
    """Share of requests that go to a new stage at once."""
    best_fit: float = 0.5
    """Share that takes the stage with the least room left."""
    late_fit: float = 0.2
    """Share that takes the last stage with room; the rest takes any."""
    window: float = 1.5
    """Mean lengths on either side of a ruin in which requests are put in."""
    windowed: float = 0.85
    """Share of recreations that look only there."""
    windowed_stages: float = 40.0
    """Stages up to which they look everywhere."""
    tried_out: float = 8.0
    """Requests left out that a recreation tries to put in, at most."""
    patience: float = 0.25
    """Share of the time without a whole schedule after which the walk returns to the best one."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class ExactParameters:
    """Values of the two exact searches (``layers.hpp``, ``stage_states.hpp``, ``end_orders.hpp``)."""

    tolerance: float = 0.0
    """Seconds by which a schedule has to be better; set for each problem."""
    bytes: float = 2.0**30
    """Memory beyond which a search gives up; larger proves more."""
    beam: float = 300.0
    """States that a layer keeps in the first pass, which looks for a schedule to beat."""
    wide_beam: float = 1_000.0
    """The same in the second pass."""
    even: float = 0.2
    """Weight, in what a beam keeps, of what is still to come."""
    width: float = 20_000.0
    """States of a layer in the first pass that can prove; with twice as many it is cut."""
    widening: float = 4.0
    """Factor by which each later pass keeps more."""
    compared: float = 24.0
    """Neighbours that a state is compared with; more leave out more states, and take longer."""
    compared_in_beam: float = 4.0
    """States, for each that a beam keeps, among which those that others are ahead of are left out."""
    set_rows: float = 15_000.0
    """Ways to serve sets of one size that are followed; more make bounds better and take longer."""
    tried_shares: float = 60.0
    """Requests tried on slots, after which they may fit."""
    improved: float = 100.0
    """Orders whose schedule costs more than the search says that are improved."""


@dataclass(frozen=True, slots=True)
class CoreParameters:
    """Values of the three searches, and how they share the time."""

    spans: SpanParameters = field(default_factory=SpanParameters)
    events: EventParameters = field(default_factory=EventParameters)
    ruin: RuinParameters = field(default_factory=RuinParameters)
    ruin_improves: RuinParameters = field(
        default_factory=lambda: RuinParameters(hot=0.3, cold=0.05, new_stage=0.0)
    )
    """Values of ruin and recreate after spans."""
    many_requests: int = 100
    """Requests from which stages cost ``many_bias`` in spans."""
    most_requests: int = 1000
    """Requests from which they cost ``most_bias``."""
    many_bias: float = 1.5
    """Factor on the price of a stage from ``many_requests`` on."""
    most_bias: float = 2.0
    """Factor from ``most_requests`` on."""
    spans_share: float = 0.9
    """Share of the time for spans where slots bind."""
    spans_curved_share: float = 0.6
    """That share with a token cap or a bend, where prompts differ."""
    spans_groups_share: float = 0.3
    """That share where stages compute shared prompts again, which spans do not know."""
    spans_memory_shares: tuple[float, ...] = (0.45, 0.5)
    """Shares of what is left for spans under memory; each attempt fills less of it."""
    memory_step: float = 0.06
    """Share of the KV capacity that the next attempt leaves free."""
    heat_again: float = 0.27
    """Factor on the temperature of the next attempt."""
    events_requests: int = 200
    """Requests up to which orders are placed backward."""
    moves_per_work: int = 20_000
    """Moves of spans per unit of ``Limits.work`` stands for."""
    ruins_per_work: int = 1000
    """Ruins per unit of it."""
    placed_per_work: int = 100_000
    """Requests placed in orders per unit of it."""
    most_steps: int = 400_000
    """Decode steps up to which start times are searched; more take more memory."""

    def __post_init__(self) -> None:
        _check(self)
