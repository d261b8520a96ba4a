"""Messages between router and workers and between workers.

All are frozen values, sent through protocol.codec. Requests travel as token ids: text ends at the
router.
"""

from __future__ import annotations

from msgspec import field

from protocol.errors import ErrorInfo
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.message import Message
from protocol.prefix import CacheChange
from protocol.sampling import Grammar, SamplingParams, TokenLogprobs
from protocol.states import FinishReason, WorkerState
from protocol.ticket import Ticket
from protocol.timeline import Span, TraceContext

# --- router -> worker -----------------------------------------------------------------------------


class Submit(Message):
    """Run one request. Sent to decode and, unless that is to prefill by itself, to prefill.

    `output_ids` are tokens the client already has (after a lost attempt): they count as output and
    the first new token has index len(output_ids). `time_left_s` is until the request's deadline.
    `peer` is the other worker of the pair, `router_id` names the event stream to answer on.
    `cache_salt`: only requests of the same salt share cached KV. `bypass_prefix_cache`: every
    prompt token has to run (its logits are wanted); what it computes is cached all the same.
    `grammar` is what the output must look like.
    `trace`: where the request stands in a distributed trace.
    """

    key: RequestKey
    router_id: str
    sampling: SamplingParams
    time_left_s: float
    output_ids: tuple[int, ...] = ()
    peer: WorkerRef | None = None
    ticket: Ticket | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    grammar: Grammar | None = None
    trace: TraceContext | None = None
    prompt_ids: tuple[int, ...]


class Cancel(Message):
    """Stop working for these attempts and free what they hold. Unknown keys are ignored."""

    keys: tuple[RequestKey, ...]


class Subscribe(Message):
    """Open the stream of events for one router. A second of the same id replaces the first."""

    router_id: str


class Ack(Message):
    """Done. `num_commands` places a Submit or Cancel among the worker's commands: a WorkerLoad with
    as many or more takes it into account."""

    num_commands: int = 0


class StatusQuery(Message):
    """Ask a worker how it is."""


class DrainCommand(Message):
    """Refuse new work, finish the old."""


# --- worker -> router -----------------------------------------------------------------------------


class TokenEvent(Message):
    """One output token. `index` counts output tokens of the request from 0, over all attempts.

    With `finish` set it is the last; `spans` then hold the worker's part of the timeline.
    `logprobs` are there when the sampling asks for them.
    """

    key: RequestKey
    index: int
    finish: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    logprobs: TokenLogprobs | None = None
    token: int


class ScoreEvent(Message):
    """Log-probabilities of prompt tokens `start`, start + 1, ...: those of one step.

    The first token of a prompt has none. All of a prompt's come, in order, before its first
    output token; a preempted prompt's may come again. With `finish` set the request ends here,
    without output.
    """

    key: RequestKey
    start: int
    finish: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    logprobs: tuple[TokenLogprobs, ...]


class PromptEvent(Message):
    """What became of the prompt, from the worker that ran it, no later than the next token.

    `num_cached_tokens` of it were not computed, because their KV was there already.
    """

    key: RequestKey
    num_cached_tokens: int


class FailEvent(Message):
    """The attempt ended here without finishing. `retriable`: another worker may well succeed."""

    key: RequestKey
    error: ErrorInfo
    spans: tuple[Span, ...] = ()
    retriable: bool


class SpanEvent(Message):
    """Timeline of a part that ended before the request did (prefill after its commit)."""

    key: RequestKey
    spans: tuple[Span, ...]


def size_class(num_tokens: int) -> int:
    """The class of a prompt with so many tokens to compute: those of class k have fewer than 2**k.
    Prefill workers run small prompts before large ones."""
    return num_tokens.bit_length()


class WorkerLoad(Message):
    """What a router needs to choose a worker. Sent in every batch of events and on request."""

    running: int = 0  # sequences in the running batch
    waiting: int = 0  # sequences accepted, not yet running
    waiting_tokens: int = 0  # prompt tokens that this worker has to compute yet
    backlog: tuple[int, ...] = ()  # the same by size class of what is left of a prompt (prefill)
    free_blocks: int = 0  # credits: blocks that a new sequence could get now, cached ones included
    total_blocks: int = 0
    tokens_per_second: float = 0.0  # prefill: of steps with much to do; decode: of all sequences
    held_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    num_commands: int = 0  # commands that are taken into account, since the worker's start

    @property
    def idle_blocks(self) -> int:
        """Blocks with nothing in them."""
        return self.total_blocks - self.held_blocks - self.cached_blocks - self.quarantined_blocks


class EventBatch(Message):
    """All events of one step for one router. An empty batch is a sign of life.

    `cache` is what the worker's prefix cache has gained and lost since the batch before.
    """

    epoch: int
    tokens: tuple[TokenEvent, ...] = ()
    scores: tuple[ScoreEvent, ...] = ()
    failures: tuple[FailEvent, ...] = ()
    spans: tuple[SpanEvent, ...] = ()
    prompts: tuple[PromptEvent, ...] = ()
    cache: CacheChange | None = None
    load: WorkerLoad


class WorkerStatus(Message):
    """A worker's answer to StatusQuery. `steps` and `last_step_age_s` prove progress."""

    ref: WorkerRef
    state: WorkerState
    load: WorkerLoad
    layout: KVLayout
    fingerprint: KVFingerprint
    max_model_len: int
    max_prompt_tokens: int  # what fits the KV pool, one output token included
    steps: int
    counters: dict[str, int] = field(default_factory=dict)
    last_step_age_s: float


# --- prefill <-> decode ---------------------------------------------------------------------------


class LinkAddress(Message):
    """How a sender rank reaches one receiver rank. `endpoint` is the backend's own address."""

    rank: int
    backend: str
    endpoint: str


class Grant(Message):
    """Decode -> prefill: blocks are reserved, start.

    `generation` is a number that this decode worker never uses twice; every later message of the
    hand-off repeats it. `block_ids` are decode's, of its size, in prompt order, for the KV of
    `num_tokens` tokens; the first `num_cached_blocks` already hold it and must not be sent.
    """

    key: RequestKey
    ticket: Ticket
    decode: WorkerRef
    generation: int
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    num_tokens: int
    layout: KVLayout
    fingerprint: KVFingerprint
    links: tuple[LinkAddress, ...]


class OpenLinks(Message):
    """Prefill -> decode: hand-offs may come soon, build the links. Without a `backend` it only asks
    for the ranks' addresses; with one, decode's ranks accept links of `incarnation` (Piece) from
    the reply on. A link that cannot be built now is built by the first piece that needs it."""

    prefill: WorkerRef
    incarnation: int = 0
    backend: str = ""
    prefill_layout: KVLayout


class LinkOffer(Message):
    """Decode's reply to OpenLinks."""

    layout: KVLayout
    links: tuple[LinkAddress, ...]


class Piece(Message):
    """Prefill -> decode: these cells (kv_layout.Cells, counted from the first token) and layers are
    ready to move.

    The reply (Ack) means that decode has checked the ticket and posted its receives; only then does
    the sender write. `index` counts the pieces of one hand-off from 0. `incarnation` numbers the
    channel, all links from this prefill to this decode worker: a higher one voids everything posted
    on a lower. `turn` grows from piece to piece of a sender: decode posts in that order, the sender
    sends in it, and a piece that comes too late for it is refused, naming `turn`. `backend` is the
    one of the grant's links that the data takes. With a one-sided one nothing is posted, the grant
    alone allows the write, and the commit carries the piece.
    """

    key: RequestKey
    ticket: Ticket
    generation: int
    index: int
    first_cell: int
    num_cells: int
    first_layer: int
    prefill: WorkerRef
    prefill_layout: KVLayout
    incarnation: int = 0
    turn: int = 0
    backend: str = ""
    num_layers: int


class Commit(Message):
    """Prefill -> decode: everything was sent. The reply (Ack) means that all of it arrived and
    decode owns the sequence from here. `num_pieces` and `checksum` let decode prove it. `written`
    are the pieces that prefill has written by itself, and that were not announced before. `number`
    counts the commits of a hand-off from 0: one that was refused, for pieces that have to come
    again, proves nothing of what comes."""

    key: RequestKey
    ticket: Ticket
    generation: int
    first_token: int
    num_pieces: int
    checksum: int = 0
    written: tuple[Piece, ...] = ()
    number: int = 0
    num_blocks: int

    @property
    def proof(self) -> tuple[object, ...]:
        """All but `written` and `number`."""
        counts = self.num_pieces, self.num_blocks, self.checksum
        return self.key, self.ticket, self.generation, self.first_token, *counts


class HandoffEnd(Message):
    """Either side -> the other: this hand-off is over without a commit.

    `released`: it is not needed (the request ended at token 1, or the client left);
    otherwise it failed and `error` says why. Idempotent; unknown keys are ignored.
    """

    key: RequestKey
    epoch: int  # of the sender of this message
    error: ErrorInfo | None = None
    released: bool
