"""Constraints of the hybrid paper's full model, a method each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from .linear_model import ModelBuilder


@dataclass(frozen=True, slots=True)
class PrefillLevel:
    """Size of prefill stage that the literal model may choose.

    tokens: Most prompt tokens, :math:`N^{cap}_l`.
    seconds: Duration of the stage, however few tokens it has, :math:`T^p_l`.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class FullColumns:
    r"""Columns of a full model.

    x: :math:`x_{ij}`: the request is on the client; shape (requests, clients).
    p, d, w: :math:`p_{ijk}`, :math:`d_{ijk}`, :math:`w_{ijk}`: it is prefilled, held, decoded (a share) there
    in the bin; shape (requests, clients, bins).
    prefill_start, prefill_time, decode_start, decode_time: :math:`t^{s,p}_k, n^p_k, t^{s,d}_k, n^d_k`,
    seconds; shape (bins,).
    end: :math:`t^{max}`, seconds; shape ().
    z, decode_steps: The bin prefills a request; its decode steps. Shape (bins,); None in the literal model.
    """

    x: IntArray
    p: IntArray
    d: IntArray
    w: IntArray
    prefill_start: IntArray
    prefill_time: IntArray
    decode_start: IntArray
    decode_time: IntArray
    end: IntArray
    z: IntArray | None = None
    decode_steps: IntArray | None = None


class FullRows:
    """Full model under construction: columns (19)-(25) and rows.

    bins: The paper's :math:`K`.
    """

    def __init__(self, problem: Problem, bins: int) -> None:
        self.problem = problem
        self.bins = bins
        self.builder = add = ModelBuilder()
        pairs, triples = (len(problem), problem.slots), (len(problem), problem.slots, bins)
        self.columns = FullColumns(
            x=add.columns("x", pairs, upper=1, integer=True),
            p=add.columns("p", triples, upper=1, integer=True),
            d=add.columns("d", triples, upper=1, integer=True),
            w=add.columns("w", triples, upper=1),
            prefill_start=add.columns("tsp", (bins,)),
            prefill_time=add.columns("np", (bins,)),
            decode_start=add.columns("tsd", (bins,)),
            decode_time=add.columns("nd", (bins,)),
            end=add.columns("tmax", (), cost=1.0),
        )

    def makespan(self) -> None:
        r"""(1)-(2): :math:`\min t^{max}`, :math:`t^{max} \ge t^{s,d}_k + n^d_k`."""
        c = self.columns
        end = np.broadcast_to(c.end, (self.bins,))
        self.builder.rows("eq2", [(1, end), (-1, c.decode_start), (-1, c.decode_time)], lower=0)

    def bins_in_order(self) -> None:
        r"""(3): :math:`t^{s,p}_k \ge t^{s,d}_{k-1} + n^d_{k-1}`."""
        c = self.columns
        terms = [(1, c.prefill_start[1:]), (-1, c.decode_start[:-1]), (-1, c.decode_time[:-1])]
        self.builder.rows("eq3", terms, lower=0)

    def decode_after_prefill(self) -> None:
        r"""(4): :math:`t^{s,d}_k \ge t^{s,p}_k + n^p_k`."""
        c = self.columns
        terms = [(1, c.decode_start), (-1, c.prefill_start), (-1, c.prefill_time)]
        self.builder.rows("eq4", terms, lower=0)

    def prefill_time_of_level(self, y: IntArray, levels: Sequence[PrefillLevel]) -> None:
        r"""(5): :math:`n^p_k \ge \sum_l T^p_l y_{kl}`."""
        seconds = np.array([level.seconds for level in levels])
        self.builder.rows("eq5", [(1, self.columns.prefill_time), (-seconds, y)], lower=0)

    def level_holds_tokens(self, y: IntArray, levels: Sequence[PrefillLevel]) -> None:
        r"""(6): :math:`\sum_{ij} N^p_i p_{ijk} \le \sum_l N^{cap}_l y_{kl}`."""
        caps = np.array([level.tokens for level in levels])
        self.builder.rows("eq6", [(self._prompts(), self._by_bin(self.columns.p)), (-caps, y)], upper=0)

    def one_level(self, y: IntArray) -> None:
        r"""(7): :math:`\sum_l y_{kl} = 1`. An empty bin pays for a level too."""
        self.builder.rows("eq7", [(1, y)], lower=1, upper=1)

    def decode_time(self) -> None:
        r"""(8): :math:`n^d_k \ge T^d \sum_i N^d_i w_{ijk}`, with :math:`T^d` the seconds of a full step."""
        cost, c = self.problem.cost, self.columns
        seconds = cost.decode_base + cost.decode_per_slot * self.problem.slots
        by_client = c.w.transpose(1, 2, 0).reshape(-1, len(self.problem))
        time = np.broadcast_to(c.decode_time, c.w.shape[1:]).ravel()
        self.builder.rows("eq8", [(1, time), (-seconds * self.problem.decode_steps, by_client)], lower=0)

    def held_when_prefilled(self) -> None:
        r"""(9): :math:`d_{ijk} \ge p_{ijk}`."""
        c = self.columns
        self.builder.rows("eq9", [(1, c.d.ravel()), (-1, c.p.ravel())], lower=0)

    def held_without_gap(self) -> None:
        r"""(10): :math:`M (2 - d_{ijk_1} - d_{ijk_2}) + \sum_{k_1}^{k_2} d_{ijk} \ge k_2 - k_1 + 1`."""
        columns = self.columns.d.reshape(-1, self.bins)
        for first in range(self.bins):
            for last in range(first + 1, self.bins):
                terms = [(1, columns[:, first : last + 1]), (-self.bins, columns[:, [first, last]])]
                offset = last - first + 1 - 2 * self.bins
                self.builder.rows(f"eq10[{first},{last}]", terms, lower=offset)

    def not_held_before_prefill(self) -> None:
        r"""(11): :math:`M (p_{ijk_1} - 1) + d_{ijk_2} \le 0` for :math:`k_1 > k_2`, M = K."""
        columns = self.columns.d.reshape(-1, self.bins)
        prefilled = self.columns.p.reshape(-1, self.bins)
        for later in range(1, self.bins):
            for earlier in range(later):
                terms = [(self.bins, prefilled[:, later]), (1, columns[:, earlier])]
                self.builder.rows(f"eq11[{later},{earlier}]", terms, upper=self.bins)

    def one_request_per_client(self) -> None:
        r"""(12): :math:`\sum_i d_{ijk} \le 1`. It also keeps a client's requests in separate bins."""
        by_client = self.columns.d.transpose(1, 2, 0).reshape(-1, len(self.problem))
        self.builder.rows("eq12", [(1, by_client)], upper=1)

    def held_in_bins(self) -> None:
        r"""(13): :math:`\sum_k d_{ijk} \le K`, which excludes nothing."""
        self.builder.rows("eq13", [(1, self.columns.d.reshape(-1, self.bins))], upper=self.bins)

    def decoded_where_assigned(self) -> None:
        r"""(14): :math:`\sum_k w_{ijk} = x_{ij}`."""
        shares = self.columns.w.reshape(-1, self.bins)
        self.builder.rows("eq14", [(1, shares), (-1, self.columns.x.ravel())], lower=0, upper=0)

    def decoded_whole(self) -> None:
        r"""(15): :math:`\sum_{jk} w_{ijk} = 1`, which (14) and (18) imply."""
        shares = self.columns.w.reshape(len(self.problem), -1)
        self.builder.rows("eq15", [(1, shares)], lower=1, upper=1)

    def one_prefill_per_client(self) -> None:
        r"""(16): :math:`\sum_i p_{ijk} \le 1`, which (9) and (12) imply."""
        by_client = self.columns.p.transpose(1, 2, 0).reshape(-1, len(self.problem))
        self.builder.rows("eq16", [(1, by_client)], upper=1)

    def prefilled_where_assigned(self) -> None:
        r"""(17): :math:`\sum_k p_{ijk} = x_{ij}`, for i and j (printed as for j and k)."""
        prefills = self.columns.p.reshape(-1, self.bins)
        self.builder.rows("eq17", [(1, prefills), (-1, self.columns.x.ravel())], lower=0, upper=0)

    def assigned(self) -> None:
        r"""(18): :math:`\sum_j x_{ij} = 1`."""
        self.builder.rows("eq18", [(1, self.columns.x)], lower=1, upper=1)

    def affine_prefill_time(self, z: IntArray) -> None:
        r"""Instead of (5)-(7): :math:`n^p_k = a z_k + b \sum_{ij} N^p_i p_{ijk}`, with floor and bend."""
        cost, time = self.problem.cost, self.columns.prefill_time
        tokens = (-cost.prefill_per_token * self._prompts(), self._by_bin(self.columns.p))
        self.builder.rows("prefill_time", [(1, time), (-cost.prefill_base, z), tokens], lower=0)
        if cost.prefill_floor > 0:
            self.builder.rows("prefill_floor", [(1, time), (-cost.prefill_floor, z)], lower=0)
        if self.problem.reaches_bend:
            # The cost is convex, so the part beyond the bend is one more line below it.
            opened = cost.prefill_base - cost.prefill_per_token_beyond * cost.prefill_bend
            slope = cost.prefill_per_token + cost.prefill_per_token_beyond
            tokens = (-slope * self._prompts(), self._by_bin(self.columns.p))
            self.builder.rows("prefill_bend", [(1, time), (-opened, z), tokens], lower=0)

    def affine_decode_time(self, decode_steps: IntArray) -> None:
        r"""Instead of (8): :math:`n^d_k = c r_k + e \sum_{ij} N^d_i w_{ijk}`; idle clients cost nothing."""
        cost, time = self.problem.cost, self.columns.decode_time
        served = np.repeat(self.problem.decode_steps, self.problem.slots)
        work = (-cost.decode_per_slot * served, self._by_bin(self.columns.w))
        self.builder.rows("decode_time", [(1, time), (-cost.decode_base, decode_steps), work], lower=0)

    def steps_serve_every_client(self, decode_steps: IntArray) -> None:
        r"""(8) in whole decode steps: :math:`r_k \ge \sum_i N^d_i w_{ijk}`."""
        by_client = self.columns.w.transpose(1, 2, 0).reshape(-1, len(self.problem))
        length = np.broadcast_to(decode_steps, self.columns.w.shape[1:]).ravel()
        self.builder.rows("decode_steps", [(1, length), (-self.problem.decode_steps, by_client)], lower=0)

    def tokens_fit(self) -> None:
        r"""Keep the problem's own cap on a prefill stage: :math:`\sum_{ij} N^p_i p_{ijk} \le N^{cap}`."""
        cap = self.problem.prefill_token_cap
        if cap is not None:
            self.builder.rows("token_cap", [(self._prompts(), self._by_bin(self.columns.p))], upper=cap)

    def prefill_opens_bin(self, z: IntArray) -> None:
        r"""Make an empty bin free: :math:`\sum_j p_{ijk} \le z_k`."""
        over_clients = self.columns.p.transpose(0, 2, 1).reshape(-1, self.problem.slots)
        opened = np.broadcast_to(z, (len(self.problem), self.bins)).ravel()
        self.builder.rows("open", [(1, over_clients), (-1, opened)], upper=0)

    def decoded_while_held(self) -> None:
        r"""Add what (1)-(25) leave out: :math:`w_{ijk} \le d_{ijk}`."""
        c = self.columns
        self.builder.rows("held", [(1, c.w.ravel()), (-1, c.d.ravel())], upper=0)

    def held_from_prefill_on(self) -> None:
        r"""(10)-(11) without a big-M: :math:`d_{ijk} \le d_{ij,k-1} + p_{ijk}`.

        By (17) there is one prefill, so the bins held begin with it and have no gap: both equations follow,
        and these few rows exclude more fractions than the tightest M there, :math:`k_2 - k_1 - 1` and 1.
        """
        columns = self.columns.d.reshape(-1, self.bins)
        prefilled = self.columns.p.reshape(-1, self.bins)
        self.builder.rows("first", [(1, columns[:, 0]), (-1, prefilled[:, 0])], upper=0)
        terms = [(1, columns[:, 1:].ravel()), (-1, columns[:, :-1].ravel()), (-1, prefilled[:, 1:].ravel())]
        self.builder.rows("onward", terms, upper=0)

    def open_bins_first(self, z: IntArray, decode_steps: IntArray) -> None:
        r"""Join a bin without prefill to the one before it: :math:`z_k \ge z_{k+1}`."""
        horizon = float(self.problem.decode_steps.sum())
        self.builder.rows("open_first", [(1, z[:-1]), (-1, z[1:])], lower=0)
        self.builder.rows("open_steps", [(1, decode_steps), (-horizon, z)], upper=0)

    def clients_in_order(self) -> None:
        r"""Clients are named by their first request: :math:`x_{ij} \le \sum_{i' < i} x_{i',j-1}`."""
        x = self.columns.x
        for i in range(min(len(self.problem), self.problem.slots - 1)):
            later = x[i, i + 1 :]
            self.builder.rows(f"unnamed[{i}]", [(1, later)], upper=0)
        for i in range(1, len(self.problem)):
            names = min(i, self.problem.slots - 1)
            terms = [(1, x[i, 1 : names + 1]), (-1, x[:i, :names].T)]
            if names:
                self.builder.rows(f"named[{i}]", terms, upper=0)

    def equal_requests_in_order(self, groups: Sequence[IntArray]) -> None:
        r"""Order equal requests by start: :math:`\sum_{jk} k (p_{i'jk} - p_{ijk}) \ge 0`."""
        at = np.tile(np.arange(self.bins), self.problem.slots)
        prefills = self.columns.p.reshape(len(self.problem), -1)
        for group in groups:
            terms = [(at, prefills[group[1:]]), (-at, prefills[group[:-1]])]
            self.builder.rows(f"equal[{group[0]}]", terms, lower=0)

    def work_fits(self, z: IntArray, decode_steps: IntArray) -> None:
        r"""Bound the decode steps, :math:`\sum_k r_k \ge \lceil \sum_i N^d_i / J \rceil`, and the stages."""
        self.builder.rows("least_steps", [(1, decode_steps[None, :])], lower=least_steps(self.problem))
        stages = -(-len(self.problem) // self.problem.slots)
        self.builder.rows("least_stages", [(1, z[None, :])], lower=stages)

    def _prompts(self) -> IntArray:
        return np.repeat(self.problem.prompt_tokens, self.problem.slots)

    def _by_bin(self, columns: IntArray) -> IntArray:
        return columns.reshape(-1, self.bins).T


def least_steps(problem: Problem) -> int:
    """Return the larger of mean load and longest request, in steps."""
    return max(-(-int(problem.decode_steps.sum()) // problem.slots), int(problem.decode_steps.max()))
