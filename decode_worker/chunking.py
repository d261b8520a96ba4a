"""How many prompt tokens a decode step takes, and how fast prompts get on so. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.prompt_order import AIMS_S, MAX_AIMING, WaitingPrompt
from worker_runtime.scheduling.step_model import StepModel, StepWork

#: Prompt tokens that a step takes at least: arithmetic has room for them while weights are read.
MIN_CHUNK = 64
#: Products of GPUs take their rows in tiles: a few rows beyond one cost a whole one.
_ROW_TILE = 64
#: Steps in a row without prompt tokens, for sequences that wait for their second token.
MAX_BARE = 2
#: Chunk until enough steps are measured.
_UNMEASURED_CHUNK = 256
#: Steps grow once prompts wait for so many seconds of work, to so many times their usual length for
#: what that saves; further only where first tokens need it, by one of so many lengths.
_WAITED_S = 0.03
_FREE_GROWTH = 1.15
_NUM_LENGTHS = 5
#: A step without decode rows, for whose end no stream waits, takes so many times the most of
#: others: prompts alone get on faster in longer steps.
_ALONE_GROWTH = 2
#: Prompts are to be computed so much before their first tokens are due: others may come first yet.
_SPARE_S = 0.03
#: What prompts get of the rate of usual steps: some steps are short for a commit, and later tokens
#: attend to earlier ones. 4,085 tokens that had not to wait took 183 to 190 ms on an H200; by usual
#: steps it is some 146.
_KEPT_SHARE = 0.8
#: A commit that is so late is not waited for any longer.
_MAX_LATE_S = 0.05
#: Share of a promised gap that a step takes: its tokens still have to reach the client.
_GAP_SHARE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingWork:
    """Prompts that wait: tokens of all, position of the first of them, and each with its tokens, in
    the order in which they run. start_s: until the next step begins. resumes: the first ones are of
    a stream that goes on here, whose client waits as well."""

    num_tokens: int
    start: int
    prompts: Iterable[tuple[int, WaitingPrompt]] = ()
    start_s: float = 0.0
    resumes: bool = False


def chunk_within(
    seconds: float,
    model: StepModel,
    *,
    contexts: Collection[int],
    start: int,
    max_tokens: int,
    strict: bool = False,
) -> int:
    """Prompt tokens, from position `start` on, for a step of about `seconds` beside decode rows
    with `contexts` tokens each. `strict`: a promise depends on it, so guesses are small."""
    if seconds == math.inf:
        return max_tokens
    if not model.known:
        return MIN_CHUNK if strict else _UNMEASURED_CHUNK
    num_tokens = model.prompt_tokens_within(
        seconds,
        num_decodes=len(contexts),
        context=sum(contexts),
        start=start,
        max_tokens=max_tokens,
    )
    rows = len(contexts) + num_tokens
    if rows > model.largest_rounded:
        num_tokens -= rows % _ROW_TILE
    return max(MIN_CHUNK, num_tokens)


def prompt_rate(
    seconds: float, model: StepModel, *, contexts: Collection[int], max_tokens: int
) -> float:
    """Prompt tokens per second of such steps, for a prompt from its start; 0 until enough steps
    were seen to tell."""
    if not model.known:
        return 0.0
    count = chunk_within(seconds, model, contexts=contexts, start=0, max_tokens=max_tokens)
    work = StepWork(
        num_decodes=len(contexts),
        context=sum(contexts),
        num_prompt_tokens=count,
        num_pairs=count * count // 2,
    )
    step_s = model.predict(work)
    return count / step_s if step_s > 0.0 else 0.0


def stretched(seconds: float, max_s: float, num_waiting: int, tokens_per_second: float) -> float:
    """What a step of usually `seconds` takes while `num_waiting` prompt tokens wait, up to `max_s`:
    the part of a step that the weights take is paid less often."""
    if not tokens_per_second:
        return seconds
    waited = num_waiting / tokens_per_second / _WAITED_S
    return max(seconds, min(max_s, seconds * math.sqrt(waited)))


def needed(lengths: Sequence[float], rates: Callable[[int], float], waiting: WaitingWork) -> float:
    """The shortest of these lengths of steps with which prompts have their first tokens within the
    first of their aims that they can reach at all. rates: prompt tokens per second in steps of each
    length."""
    chosen, longest, num_tokens = 0, len(lengths) - 1, 0
    for count, prompt in islice(waiting.prompts, MAX_AIMING):
        num_tokens += count
        for aim in range(len(AIMS_S)):
            left_s = max(0.0, prompt.due_s(aim) - waiting.start_s - _SPARE_S)
            if num_tokens <= left_s * rates(chosen):
                break
            if num_tokens <= left_s * rates(longest):
                longer = range(chosen + 1, longest + 1)
                chosen = next(i for i in longer if num_tokens <= left_s * rates(i))
                break
        if chosen == longest:
            break
    return lengths[chosen]


def bounded(
    seconds: float, *, gaps_s: Iterable[float], arriving: Collection[tuple[float, float]]
) -> tuple[float, bool]:
    """`seconds` of a step, or less for the strictest of the promised gaps in it, and whether that
    one decides. `arriving`: of sequences being received, seconds until their commit, and gaps.

    A sequence that is committed while a step runs waits for its end and for the next step: a step
    ends where the next commit is due.
    """
    gap_s = min(gaps_s, default=math.inf)
    if arriving:
        due = [max(0.0, left_s) for left_s, _ in arriving if left_s > -_MAX_LATE_S]
        seconds = min([seconds, *due])
        gap_s = min(gap_s, min(gap for _, gap in arriving) / 2)
    gap_s *= _GAP_SHARE
    return min(seconds, gap_s), gap_s < seconds


class PromptBudget:
    """Prompt tokens of each step of one decode worker, by its configuration and the times that its
    steps took."""

    def __init__(self, config: WorkerConfig, model: StepModel) -> None:
        self._usual_s = config.target_step_s or math.inf
        self._max_s = config.max_step_s
        self._max_tokens = config.max_num_batched_tokens
        self._model = model
        self._num_bare = 0  # steps in a row without tokens of the prompts that wait

    def per_second(self, contexts: Collection[int]) -> float:
        """Prompt tokens per second beside decode rows with so many tokens each; 0 when unknown."""
        return _KEPT_SHARE * self._step_rate(self._usual_s, contexts)

    def _step_rate(self, seconds: float, contexts: Collection[int]) -> float:
        """The same in a step of so many seconds."""
        return prompt_rate(seconds, self._model, contexts=contexts, max_tokens=self._max_tokens)

    def _grown(self, contexts: Collection[int], waiting: WaitingWork) -> float:
        """Seconds of a step while prompts wait: a little more than usual for what longer steps
        save, up to the most where first tokens are in time only so."""
        usual_s, max_s = self._usual_s, self._max_s
        rate = self._step_rate(usual_s, contexts)
        if not rate or usual_s >= max_s:
            return usual_s
        free_s = stretched(usual_s, min(max_s, _FREE_GROWTH * usual_s), waiting.num_tokens, rate)
        last = _NUM_LENGTHS - 1
        lengths = [free_s + (max_s - free_s) * number / last for number in range(_NUM_LENGTHS)]

        @cache
        def rates(number: int) -> float:
            known = (
                rate if lengths[number] == usual_s else self._step_rate(lengths[number], contexts)
            )
            return _KEPT_SHARE * known

        return needed(lengths, rates, waiting)

    def take(
        self,
        *,
        contexts: Collection[int],
        gaps_s: Iterable[float],
        arriving: Collection[tuple[float, float]],
        waited_s: float,
        waiting: WaitingWork,
    ) -> int:
        """Tokens for the next step, of those that wait.

        contexts, gaps_s, arriving: as for `chunk_within` and `bounded`. waited_s: since the commit
        of a decode row that has its second token in this step, until the step begins; 0: none has.
        Few prompt tokens cost much for what they are: a step that has to be short for a commit has
        none, up to `MAX_BARE` times in a row, if later ones have more.
        """
        usual_s = self._usual_s
        if not contexts:
            usual_s = max(usual_s, _ALONE_GROWTH * self._max_s)
        elif waiting.num_tokens and not waited_s:
            usual_s = self._grown(contexts, waiting)
        target_s, promised = bounded(usual_s, gaps_s=gaps_s, arriving=arriving)
        target_s -= waited_s
        within = partial(chunk_within, model=self._model, contexts=contexts, start=waiting.start)
        all_waiting = min(self._max_tokens, waiting.num_tokens)
        count = within(target_s, max_tokens=all_waiting, strict=promised)
        hurried = bool(contexts) and target_s < usual_s and not (promised or waiting.resumes)
        bare = hurried and count == MIN_CHUNK < waiting.num_tokens and self._num_bare < MAX_BARE
        if bare and within(usual_s, max_tokens=self._max_tokens) > MIN_CHUNK:
            self._num_bare += 1
            return 0
        self._num_bare = 0
        return count
