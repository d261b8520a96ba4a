"""How long before the running step ends the next one is planned (decisions 59 and 81)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

#: The lead is what most of the latest launches needed, half of that again for other ranks, which
#: begin later, and time to wake up. With less the device idles; with more, what arrives meanwhile
#: waits for a step more.
_LEAD_SHARE = 0.85
_RANKS_FACTOR = 1.5
_LEAD_S = 0.0005
_HISTORY = 32
#: So much of a step's time on the device its later layers may take to launch. The time includes
#: pauses in which the device waited for them, so with 1 a step bound by them would need no lead.
_BESIDE_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class _Launch:
    """Seconds of one step: from its plan to the launch of its first layer, to the end of its
    launch, and on the device, 0 until it has landed."""

    first_s: float
    whole_s: float
    device_s: float = 0.0

    @property
    def lead_s(self) -> float:
        """The device runs the first layers while the host launches the others."""
        beside_s = self.whole_s - self.first_s - _BESIDE_SHARE * self.device_s
        return self.first_s + max(0.0, beside_s)


class PlanLead:
    """Learned from the latest steps, which land in the order of their launches. seconds: the lead
    of the next plan."""

    def __init__(self, num_ranks: int) -> None:
        self._factor = _RANKS_FACTOR if num_ranks > 1 else 1.0
        self._launches: deque[_Launch] = deque(maxlen=_HISTORY)
        self._in_flight = 0
        self.seconds = _LEAD_S

    def launched(self, *, first_s: float, whole_s: float) -> None:
        """From a step's plan to the launch of its first layer, and to the end of its launch."""
        self._launches.append(_Launch(first_s, whole_s))
        self._in_flight += 1
        usual_s = sorted(launch.lead_s for launch in self._launches)
        self.seconds = usual_s[int(_LEAD_SHARE * len(usual_s))] * self._factor + _LEAD_S

    def landed(self, device_s: float) -> None:
        """The oldest step in flight took so long on its device; 0 where none measures."""
        at = -self._in_flight
        self._launches[at] = replace(self._launches[at], device_s=device_s)
        self._in_flight -= 1
