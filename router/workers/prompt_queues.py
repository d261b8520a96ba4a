"""Which prompt should leave the worker on which it waits, and where to. Pure.

Workers report the prompts that wait on them, and when the first token of each is wanted and
expected (protocol.messages.QueuedPrompt). A prompt that would be late where it is, or that keeps
another from being in time, goes to a worker on which it is in time and makes none late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import msgspec

from protocol.ids import RequestKey, Role
from protocol.loads import QueuedPrompt
from protocol.messages import WorkerLoad

W = TypeVar("W")

#: From the step that computes the last token of a prompt until its first token reaches the client,
#: and from the report of a late prompt until it waits elsewhere.
_DELIVERY_S = 0.01
_MOVE_S = 0.005
#: Between two looks at the queues.
LOOK_S = 0.005
#: A worker that was asked for a prompt has answered by then, or has begun with it.
ASKED_S = 0.05
#: How often an output may be given back.
MAX_GIVEN_BACK = 2
#: Late prompts for which places are looked for at a time.
_MAX_LATE = 4
#: The smallest prompts of a queue that are looked at.
_MAX_SMALL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQueue:
    """The prompts of a worker by its report, which came `age_s` ago. `unseen_tokens`: of those that
    were given to it and are not in the report, or are about to be. `room_tokens`: of a prompt that
    it would take."""

    load: WorkerLoad
    role: Role
    age_s: float
    unseen_tokens: int
    room_tokens: int

    @property
    def rate(self) -> float:
        """Prompt tokens per second; 0 when unknown."""
        if self.role is Role.PREFILL:
            return self.load.tokens_per_second
        return self.load.prompt_tokens_per_second

    @property
    def now(self) -> float:
        """On the worker's clock."""
        return self.load.clock + self.age_s

    def late(self) -> list[QueuedPrompt]:
        """Prompts that would be late here, though they are not due yet."""
        return [p for p in self.load.prompts if p.due_at > self.now and not _in_time(p)]

    def without(self, *gone: QueuedPrompt) -> PromptQueue:
        """The same if these prompts, of which nothing is computed, were not here."""
        prompts = []
        for prompt in self.load.prompts:
            if prompt not in gone:
                before = sum(each.left_tokens for each in gone if each.ends_at <= prompt.ends_at)
                ends_at = prompt.ends_at - before / self.rate
                prompts.append(msgspec.structs.replace(prompt, ends_at=ends_at))
        load = msgspec.structs.replace(self.load, prompts=tuple(prompts))
        return replace(self, load=load)

    def leaving(self) -> Iterator[QueuedPrompt]:
        """Prompts that could leave so that one more is in time: late ones, and those that late ones
        wait for; the smallest first."""
        late = self.late()
        if not late or not self.rate:
            return
        waiting = (p for p in self.load.prompts if not p.begun)
        small = sorted(waiting, key=lambda p: p.left_tokens)[:_MAX_SMALL]
        yield from (prompt for prompt in small if prompt in late)
        for prompt in (each for each in small if each not in late):
            for each in late[:_MAX_LATE]:
                due_s = each.due_at - self.now
                rest = self.without(prompt, each)
                if rest.begins_s(each.left_tokens, due_s) is not None:
                    yield prompt
                    break

    def begins_s(self, num_tokens: int, due_s: float) -> float | None:
        """Seconds until a prompt would begin here that is due in `due_s`; None where it would be
        late or make others late. It runs behind those that are due before it."""
        rate = self.rate
        if not rate or num_tokens >= self.room_tokens:
            return None
        work_s = num_tokens / rate
        due_at, begins_at = self.now + due_s, max(self.load.free_at, self.now + _MOVE_S)
        for prompt in filter(_in_time, self.load.prompts):
            if prompt.due_at <= due_at:
                begins_at = max(begins_at, prompt.ends_at)
            elif not _in_time(prompt, work_s):
                return None
        begins_at += max(0, self.unseen_tokens) / rate
        return begins_at - self.now if begins_at + work_s + _DELIVERY_S <= due_at else None


def _in_time(prompt: QueuedPrompt, later_s: float = 0.0) -> bool:
    return prompt.ends_at + later_s + _DELIVERY_S <= prompt.due_at


def find_move(
    queues: Mapping[W, PromptQueue], may_leave: Callable[[RequestKey, W], bool]
) -> tuple[RequestKey, int, W, W] | None:
    """A prompt, its tokens, the worker to leave and the one to go to; None if none should."""
    for source, queue in queues.items():
        leaving = (prompt for prompt in queue.leaving() if may_leave(prompt.key, source))
        for prompt in islice(leaving, _MAX_LATE):
            due_s = prompt.due_at - queue.now
            begins = {
                other: begins_s
                for other, each in queues.items()
                if other is not source
                and (begins_s := each.begins_s(prompt.left_tokens, due_s)) is not None
            }
            if begins:
                return prompt.key, prompt.left_tokens, source, min(begins, key=begins.__getitem__)
    return None
