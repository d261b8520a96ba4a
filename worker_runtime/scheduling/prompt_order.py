"""In which order waiting prompts are computed. Pure.

Each prompt aims at a first token within the first of AIMS_S that it can still reach; a promised one
aims at its promise first. Prompts run in the order in which their first tokens are due. Where one
would be late so, the largest of those that run until then gives way: it aims at the next time, and
goes behind. So as many as possible are in time where not all can be, and those that give way are
in time for the next aim if they can (after J. M. Moore, An n job, one machine sequencing algorithm
for minimizing the number of late jobs, Management Science 15, 1968).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds to the first token.
AIMS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
#: Beyond the last of them the least work comes first; a second of waiting makes up for so much.
_AGING = 0.1
#: Of more prompts only so many are looked at: where so many wait, most are late.
MAX_AIMING = 64


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Seconds that it still takes to compute, since it came, and until its promised first token.
    `starved` ones have waited so long that they come first, by age."""

    work_s: float
    waited_s: float
    promised_s: float | None = None
    starved: bool = False

    def due_s(self, aim: int) -> float:
        """Seconds until its first token is due, at one of AIMS_S; infinity beyond them."""
        if aim == len(AIMS_S):
            return math.inf
        if self.promised_s is None:
            return AIMS_S[aim] - self.waited_s
        return self.promised_s + AIMS_S[aim] - AIMS_S[0]

    def next_aim(self, aim: int, start_s: float) -> int:
        """The first from `aim` on that it can reach if it begins in `start_s`."""
        while start_s + self.work_s > self.due_s(aim):
            aim += 1
        return aim

    @property
    def rank(self) -> tuple[bool, float]:
        """Among prompts without an aim: promised ones first, then the least work."""
        return self.promised_s is None, self.work_s - _AGING * self.waited_s


def prompt_order(prompts: Sequence[WaitingPrompt], start_s: float) -> list[int]:
    """Their indices in the order in which they run, one after the other, from `start_s` seconds on.
    `prompts` are in the order of their arrival."""
    starved = [i for i, each in enumerate(prompts) if each.starved]
    start_s += sum(prompts[i].work_s for i in starved)
    others = (i for i, each in enumerate(prompts) if not each.starved)
    ranked = sorted(others, key=lambda i: prompts[i].rank)
    aims = {i: prompts[i].next_aim(0, start_s) for i in ranked[:MAX_AIMING]}
    line = sorted(
        (due_s, i) for i, aim in aims.items() if (due_s := prompts[i].due_s(aim)) < math.inf
    )
    ends = [start_s]  # of the prompts in line that are in time so far, after the start
    while len(ends) <= len(line):
        due_s, i = line[len(ends) - 1]
        end_s = ends[-1] + prompts[i].work_s
        if end_s <= due_s:
            ends.append(end_s)
            continue
        at = _gives_way(prompts, aims, line[: len(ends)])
        _, large = line.pop(at)
        del ends[at + 1 :]
        aims[large] = prompts[large].next_aim(aims[large] + 1, ends[-1])
        if (due_s := prompts[large].due_s(aims[large])) < math.inf:
            insort(line, (due_s, large))
    chosen = {i for _, i in line}
    return starved + [i for _, i in line] + [i for i in ranked if i not in chosen]


def _gives_way(
    prompts: Sequence[WaitingPrompt], aims: dict[int, int], line: list[tuple[float, int]]
) -> int:
    """Which of a line must give way to the last one, which is late: the largest, of those without a
    promise if there is one, that goes behind it with its next aim; or the last one itself."""
    last_due_s, last = line[-1]
    behind = [
        (prompts[i].promised_s is None, prompts[i].work_s, at)
        for at, (_, i) in enumerate(line)
        if i == last or prompts[i].due_s(aims[i] + 1) > last_due_s
    ]
    return max(behind)[2]
