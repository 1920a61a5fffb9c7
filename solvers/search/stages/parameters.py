"""Tuned values of the annealing over stage times."""

from __future__ import annotations

from dataclasses import dataclass

SHARES = (
    "start_share", "rounding_left", "rounding_share", "run_moves", "rest_moves",
    "stretch_moves", "resize_moves", "kink", "idle_worth",
)  # fmt: skip
"""Names of the fields that are shares."""


@dataclass(frozen=True, slots=True)
class StageTimeParameters:
    """Values of the phase ``stage_times``: starts, walk, and whole slots."""

    requests_per_slot: float = 10.0
    """Requests per slot up to which the phase runs."""
    start_share: float = 0.3
    """Share of the time for a better start."""
    start_patiences: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0, 0.5)
    """Patiences of the ski-rental rule for starts."""
    start_numbers: int = 5
    """Numbers of unevenly spread stages to start from."""
    start_spans: tuple[int, ...] = (1200, 800, 400)
    """Most spans of a start; fewer follow if no schedule was made."""
    start_scale: float = 1.001
    """Factor on a start's decode steps, as lengths are whole."""
    brief_seconds: float = 3.0
    """Seconds left up to which starts have fewer spans."""
    brief_spans: int = 1800
    """Most spans of such a start."""
    brief_stages: int = 160
    """Most stages of such a start."""
    count_ratio: float = 1.25
    """Ratio of neighbouring numbers of stages tried."""
    draws: int = 12
    """Stage times to draw for each number of stages."""
    kept_draws: int = 3
    """Draws to keep of them."""
    uneven: float = 0.5
    """Largest shift of a stage from even spacing, in distances."""
    most_spans: int = 4000
    """Spans from which a price takes seconds."""
    hot: float = 0.5
    """Temperature of a long walk at the start, in costs of a stage."""
    cold: float = 0.04
    """Temperature at the end, and at the start of a short walk."""
    long_walk: int = 2000
    """Steps from which a walk is long."""
    timed_steps: int = 4
    """Steps after which a walk estimates their number."""
    few_requests: int = 40
    """Requests up to which a walk always starts hot."""
    kink: float = 0.15
    """Further price of missing slots, and discount of spare ones."""
    idle_worth: float = 0.05
    """Worth of a spare slot, as a share of its decode steps."""
    uneven_stages: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2, 2.0)
    """Prompt tokens of a stage over the mean stage's, to price uneven ones."""
    run_moves: float = 0.45
    """Share of shifts that shift a run of stages from one on."""
    rest_moves: float = 0.65
    """The same share, with the shifts of stages between two added."""
    stretch_moves: float = 0.7
    """Share of moves that fit one span to a nearby request's length."""
    resize_moves: float = 0.25
    """Share of steps that add or remove a stage."""
    candidates: int = 96
    """Stage times to draw at a time."""
    screened: int = 8
    """Stage times to screen at a time."""
    priced: int = 6
    """Candidates of one draw to price before a new draw."""
    prices_kept: int = 24
    """Slot prices that screen candidates; more refuse more and take longer."""
    feasible_kept: int = 24
    """Cheapest stage times to keep for rounding."""
    first_rounding: float = 0.5
    """Seconds before the first schedule; doubled for each further one."""
    step_seconds: float = 0.01
    """Seconds that a step counts as, if steps are limited."""
    stretch: float = 1e-3
    """Share of decode steps for the first stretch of stage times."""
    stretches: int = 6
    """Most stretches, each by twice as much."""
    rounding_left: float = 0.4
    """Share of the seconds left for rounding one set of stage times."""
    longest_rounding: float = 2.0
    """Most seconds for that."""
    rounding_share: float = 0.08
    """Share of the time for the last schedule."""
    roundings: float = 12.0
    """Seconds kept for that, as a multiple of the last rounding's."""
    rounding_nodes: int = 200
    """Nodes after which a search for whole slots ends."""
    some_spans: int = 400
    """Spans up to which one more slot is tried in each."""
    few_spans: int = 120
    """Spans up to which any number of slots is tried in each."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 2**40:
                    raise ValueError(f"{name} is {number!r}; it must be above 0 and finite")
            if value == ():
                raise ValueError(f"{name} is empty; give a number at least")
            if name in SHARES and value > 1:
                raise ValueError(f"{name} is {value!r}; it must be at most 1")
        if self.count_ratio <= 1:
            raise ValueError(f"count_ratio is {self.count_ratio!r}; it must be above 1")


STANDARD = StageTimeParameters()
"""Values without a file of parameters."""
