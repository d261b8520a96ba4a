"""Messages between router and workers, and between workers, and the ticket that permits a hand-off.
Requests travel as token ids."""

from __future__ import annotations

import hmac
import math

from msgspec import field
from msgspec.structs import replace

from protocol.errors import ErrorInfo, StaleMessage
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import CacheChange, KVFingerprint, KVLayout
from protocol.loads import QueuedPrompt, TierLoad
from protocol.message import Message
from protocol.sampling import Grammar, SamplingParams, TokenLogprobs
from protocol.states import FinishReason, WorkerState
from protocol.timeline import Span, TraceContext


class Ticket(Message):
    """The router's signed permission to write `num_blocks` blocks for `key` from the sender's epoch
    into the receiver's, for a while.

    `lifetime_s` starts when a worker accepts the request. `signature`: HMAC-SHA256 (RFC 2104) over
    all other fields with the cluster's secret.
    """

    key: RequestKey
    sender_epoch: int
    receiver_epoch: int
    num_blocks: int
    signature: bytes = b""
    lifetime_s: float

    def _body(self) -> bytes:
        fields = (
            self.key.request_id,
            self.key.attempt,
            self.sender_epoch,
            self.receiver_epoch,
            self.num_blocks,
            self.lifetime_s.hex(),
        )
        return "\x1f".join(map(str, fields)).encode()

    def signed(self, secret: bytes) -> Ticket:
        return replace(self, signature=hmac.digest(secret, self._body(), "sha256"))

    def verify(self, secret: bytes) -> None:
        """Raise StaleMessage when the signature is wrong or the lifetime is not finite."""
        expected = hmac.digest(secret, self._body(), "sha256")
        if not hmac.compare_digest(expected, self.signature):
            raise StaleMessage(f"ticket of {self.key} has a wrong signature", param="ticket")
        if not math.isfinite(self.lifetime_s):
            raise StaleMessage(f"ticket of {self.key} never ends", param="ticket")


# --- router -> worker -----------------------------------------------------------------------------


class PrefixSource(Message):
    """A worker that may have the KV of a prompt's first `num_tokens` tokens, and permission."""

    worker: WorkerRef
    ticket: Ticket
    num_tokens: int


class Submit(Message):
    """Run one request. Sent to the decode worker and, unless that prefills by itself, to the
    prefill worker.

    `output_ids`: tokens that the client has from earlier attempts; the first new token has index
    len(output_ids). `time_left_s`: until the request's deadline. `peer`: the other worker of the
    pair. `router_id`: of the event stream. `cache_salt`: requests with equal salts share cached KV.
    `bypass_prefix_cache`: compute every prompt token, whose logits are needed; the result is
    cached. `gap_s`, `first_s`: the longest time between two promised tokens, and until the first.
    `live`: `peer` runs this sequence and goes on while its full blocks move here; the rest is
    computed here. `keep_s`: the conversation should return within so many seconds: lower tiers keep
    its KV. `source`: to the worker that computes the prompt: where more of its KV may be.
    `waited_s`: since it came to another worker that gave it back; `first_s` counts from then.
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
    gap_s: float | None = None
    first_s: float | None = None
    live: bool = False
    keep_s: float = 0.0
    source: PrefixSource | None = None
    waited_s: float = 0.0
    prompt_ids: tuple[int, ...]


class Cancel(Message):
    """Stop these attempts and free their blocks. Unknown keys are ignored. With `unless_begun` only
    those of whose prompt nothing is computed: they are given back, with an event (FailEvent)."""

    unless_begun: bool = False
    keys: tuple[RequestKey, ...]


class MoveRequest(Message):
    """Move a running sequence to `peer`, which has accepted it under the key `to` and knows its
    first `num_output` output tokens. It goes on here while its full blocks move; the commit carries
    the tokens that came since. After a failure it goes on here for good."""

    key: RequestKey
    to: RequestKey
    ticket: Ticket
    num_output: int
    peer: WorkerRef


class Subscribe(Message):
    """Open the stream of events for one router. A second stream of the same id replaces the
    first."""

    router_id: str


class Ack(Message):
    """Done. `num_commands` places a Submit or Cancel among the worker's commands: a WorkerLoad with
    as many or more takes it into account."""

    num_commands: int = 0


class StatusQuery(Message):
    """Request a WorkerStatus."""


class RoleCommand(Message):
    """Take the work of this role from now on. Routers give new requests accordingly, and move the
    sequences of a worker that does not decode any more."""

    role: Role


class DrainCommand(Message):
    """Refuse new requests and finish the running ones."""


# --- worker -> router -----------------------------------------------------------------------------


class TokenEvent(Message):
    """One output token. `index` counts output tokens of the request from 0, over all attempts.

    With `finish` set it is the last token; `spans` are then the worker's part of the timeline.
    `logprobs` are set when sampling.logprobs is.
    """

    key: RequestKey
    index: int
    finish: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    logprobs: TokenLogprobs | None = None
    token: int


class ScoreEvent(Message):
    """Log-probabilities of prompt tokens `start`, start + 1, ... that one step computed.

    The first token of a prompt has none. All events of a prompt come in order before its first
    output token; those of a preempted prompt may be repeated. With `finish` set the request ends
    without output.
    """

    key: RequestKey
    start: int
    finish: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    logprobs: tuple[TokenLogprobs, ...]


class PromptEvent(Message):
    """Prompt tokens found in the prefix cache. Sent no later than the first token, by the worker
    that runs the prompt and by one that sends that token for it (Commit)."""

    key: RequestKey
    num_cached_tokens: int


class FailEvent(Message):
    """The attempt failed. `retriable`: another worker may succeed. `given_back`: it was asked for
    (Cancel), and this worker has done nothing for it."""

    key: RequestKey
    error: ErrorInfo
    spans: tuple[Span, ...] = ()
    given_back: bool = False
    retriable: bool


class SpanEvent(Message):
    """Spans of a worker that ends before the request does: prefill after its commit."""

    key: RequestKey
    spans: tuple[Span, ...]


def size_class(num_tokens: int) -> int:
    """Size class of a prompt with `num_tokens` to compute: class k has fewer than 2**k tokens."""
    return num_tokens.bit_length()


class WorkerLoad(Message):
    """Load of a worker, for the choice of a worker. Sent in every EventBatch and WorkerStatus.

    `prompts`: those that wait and are not due yet, in the order in which they run; a part of them
    where many wait, none before the worker knows how long its steps take. `free_at`: when the steps
    in flight should have ended, 0 without. `clock`: the worker's, when this was sent.
    """

    running: int = 0  # sequences in the running batch
    waiting: int = 0  # sequences accepted, not yet running
    waiting_tokens: int = 0  # prompt tokens not yet computed
    backlog: tuple[int, ...] = ()  # waiting_tokens by size class of a prompt's rest (prefill)
    free_blocks: int = 0  # blocks that a new sequence could get, cached ones included
    total_blocks: int = 0
    tokens_per_second: float = 0.0  # prefill: of well-filled steps; decode: of all sequences
    prompt_tokens_per_second: float = 0.0  # decode: of steps that ran prompt tokens
    decode_step_s: float = 0.0  # decode: a step without prompt tokens; idle: the shortest so far
    held_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    queued_blocks: int = 0  # decode: blocks that waiting sequences have not got yet
    num_commands: int = 0  # commands accounted for, since the worker's start
    prompts: tuple[QueuedPrompt, ...] = ()
    free_at: float = 0.0
    clock: float = 0.0

    @property
    def idle_blocks(self) -> int:
        """Blocks that are neither held, cached nor quarantined."""
        return self.total_blocks - self.held_blocks - self.cached_blocks - self.quarantined_blocks


class EventBatch(Message):
    """All events of one step for one router; an empty batch is a heartbeat. `state` and `role` are
    those of now. `cache`: change of the worker's prefix cache since the previous batch."""

    epoch: int
    state: WorkerState = WorkerState.READY
    role: Role
    tokens: tuple[TokenEvent, ...] = ()
    scores: tuple[ScoreEvent, ...] = ()
    failures: tuple[FailEvent, ...] = ()
    spans: tuple[SpanEvent, ...] = ()
    prompts: tuple[PromptEvent, ...] = ()
    cache: CacheChange | None = None
    load: WorkerLoad


class WorkerStatus(Message):
    """A worker's answer to StatusQuery. `role` is that of now. `precision`: of its weights, for
    users. `steps` and `last_step_age_s` prove progress."""

    ref: WorkerRef
    state: WorkerState
    role: Role
    load: WorkerLoad
    layout: KVLayout
    fingerprint: KVFingerprint
    precision: str = ""
    max_model_len: int
    max_prompt_tokens: int  # what fits the KV pool, one output token included
    steps: int
    counters: dict[str, int] = field(default_factory=dict)
    tiers: tuple[TierLoad, ...] = ()
    last_step_age_s: float


# --- prefill <-> decode ---------------------------------------------------------------------------


class LinkAddress(Message):
    """How a sender rank reaches one receiver rank. `endpoint` is an address of the backend."""

    rank: int
    backend: str
    endpoint: str


class Grant(Message):
    """Decode -> prefill: blocks are reserved, start.

    `generation`: a number that this decode worker never reuses; later messages of the hand-off
    repeat it. `block_tables`: decode's blocks, of decode's block size, for each KV group in prompt
    order, for the KV of `num_tokens` tokens; groups with a window begin with the block of the first
    token that the one after the prompt sees. The first `num_cached_blocks` blocks of the prompt
    hold their KV already and are not sent.
    """

    key: RequestKey
    ticket: Ticket
    decode: WorkerRef
    generation: int
    block_tables: tuple[tuple[int, ...], ...]
    num_cached_blocks: int
    num_tokens: int
    layout: KVLayout
    fingerprint: KVFingerprint
    links: tuple[LinkAddress, ...]


class OpenLinks(Message):
    """Prefill -> decode: build links ahead of the first hand-off. Without a `backend` it only asks
    for the ranks' addresses; with one, decode's ranks accept links of `incarnation` (see Piece)
    after the reply. The first piece builds a link that is missing."""

    prefill: WorkerRef
    incarnation: int = 0
    backend: str = ""
    prefill_layout: KVLayout


class LinkOffer(Message):
    """Decode's reply to OpenLinks."""

    layout: KVLayout
    links: tuple[LinkAddress, ...]


class Piece(Message):
    """Prefill -> decode: these cells (kv_layout.Cells, counted from the first token, KV group after
    KV group) and layers are ready to move.

    The reply (Ack) means that decode has checked the ticket and posted its receives; the sender
    writes after it. `index` counts the pieces of a hand-off from 0. `incarnation` numbers the
    channel, that is all links from this prefill to this decode worker: a higher one voids what was
    posted on a lower one. `turn` grows with each piece of a sender: decode posts and the sender
    sends in that order, and decode refuses a piece that is too late, naming `turn`. `backend`
    selects one of the grant's links. A one-sided backend needs no posted receive: the grant allows
    the write, and the commit lists the piece.
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


class CommitNotice(Message):
    """Prefill -> decode: the last chunk of a prompt has been launched; the commit follows in about
    `in_s` seconds. For decode's planning alone: it may be lost, late or wrong."""

    key: RequestKey
    epoch: int  # of the prefill worker
    in_s: float


class Commit(Message):
    """Sender -> receiver: everything was sent. The reply (Ack) means that all of it arrived and
    that the receiver owns the sequence.

    `tokens` follow those that the receiver knows: token 1 after a prefill, and of a running
    sequence those that the sender has sampled meanwhile. The router has them, unless `held` is
    set: the receiver sends a PromptEvent of so many cached tokens, and with its next step them.
    `num_pieces` and `checksum` prove completeness. `written`: pieces that prefill wrote by itself,
    without announcing them. `number` counts the commits of a hand-off from 0: after a refusal,
    missing pieces are sent again and a new commit follows.
    """

    key: RequestKey
    ticket: Ticket
    generation: int
    tokens: tuple[int, ...]
    held: int | None = None
    num_pieces: int
    checksum: int = 0
    written: tuple[Piece, ...] = ()
    number: int = 0
    num_blocks: int

    @property
    def proof(self) -> tuple[object, ...]:
        """All but `written` and `number`."""
        counts = self.num_pieces, self.num_blocks, self.checksum
        return self.key, self.ticket, self.generation, self.tokens, self.held, *counts


class HandoffEnd(Message):
    """Either side -> the other: the hand-off ends without a commit. Idempotent; unknown keys are
    ignored.

    `released`: not needed any more (the request ended at token 1, or the client disconnected);
    otherwise it failed with `error`. `to_sender`: this message goes to the sender of the hand-off.
    """

    key: RequestKey
    epoch: int  # of the worker that sends this message
    to_sender: bool
    error: ErrorInfo | None = None
    released: bool
