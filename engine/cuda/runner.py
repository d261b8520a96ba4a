"""One rank of an engine on a GPU: its model, its KV pool, its graphs, and how a step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.cuda.comm import RankCollectives
from engine.cuda.graphs import GraphSet
from engine.cuda.layout import ChunkRows, ChunkUploader, DecodeRows
from engine.cuda.memory import MEMORY_SHARE, RESERVE_BYTES, blocks_that_fit
from engine.cuda.model import CudaModel, RankShape
from engine.cuda.options import CudaOptions, graph_batches, next_size
from engine.cuda.pieces import PromptPieces, piece_sizes
from engine.cuda.plan import BatchLimits, StepPlan, plan_step
from engine.cuda.prefill import ChunkAttention, cudnn_serves
from engine.cuda.sampler import TokenSampler
from engine.cuda.split_decode import SplitDecode
from engine.cuda.staging import StagingLane, StagingRing, to_device, to_host
from engine.cuda.warmup import largest_prompts, warmup_steps
from engine.errors import RankLost
from engine.kernels.logprobs import LogprobRows
from engine.kernels.triton.attention import DecodeScratch, DecodeShape, decode_shape
from engine.kv.pool import KVPool
from engine.kv.sizing import block_bytes, kv_layout, num_kv_blocks
from engine.model.config import ModelConfig
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader, WeightSource
from protocol.kv_layout import KVLayout
from protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class PendingTokens:
    """A step on its way: its tokens, and tables of log-probabilities, are being copied to the
    host."""

    ring: StagingRing
    buffer: Tensor
    index: int
    plan: StepPlan
    logprobs: Tensor | None
    scores: Tensor | None
    watch: Callable[[], None] | None
    number: int

    def wait(self) -> StepResult:
        """Block until the step is over; its KV is written then, too.

        Raises RankLost when another rank is gone or its GPU stayed silent.
        """
        self.ring.wait(self.index, self.watch)
        self.check_peers()
        *sampled, _ = self.buffer.tolist()
        plan = self.plan
        tokens = tuple(None if row is None else sampled[row] for row in plan.results)
        logprobs = _read(plan.logprobs, self.logprobs)
        return StepResult(
            tokens=tokens,
            logprobs={index: entry for index, (entry,) in logprobs.items()},
            target_logprobs=_read(plan.scored, self.scores),
        )

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block."""
        return self.ring.is_over(self.index)

    def check_peers(self) -> None:
        """Raise RankLost when a step, this or an earlier one, gave up waiting for a peer's sums."""
        if self.buffer[-1]:
            raise RankLost("a rank's GPU stayed silent in an all-reduce", param="tp")


def _read(rows: LogprobRows | None, table: Tensor | None) -> dict[int, tuple[TokenLogprobs, ...]]:
    return {} if rows is None or table is None else rows.read(table)


class CudaRunner:
    """Loads one rank's share, then runs steps on it. All ranks get the same batches in order.

    Between the two come `open` (the size of the KV pool is rank 0's decision) and `start` (with all
    ranks at once, for it captures collectives). Steps are put on a stream of the runner's own;
    `launch` never waits for the device.
    """

    depth = 2
    layout: KVLayout
    pool: KVPool
    _cuts: dict[tuple[int, bool], DecodeShape]

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: WeightSource,
        options: CudaOptions,
        *,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.options = options
        self.vocab_size = model_config.vocab_size
        limit = model_config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or limit, limit)
        self._rank = rank
        self._followed: deque[PendingTokens] = deque()  # a follower's steps not known to be over
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = device or torch.device(config.device)
        self._lane = StagingLane(self.device)
        share = share_of(model_config, rank, config.tp_size)
        self._shape = RankShape.of(model_config, share)
        with torch.inference_mode():
            loader = WeightLoader(model_config, share, source, self.device)
            self.weights = loader.load(self.max_model_len)
        shape, pdl = self._shape, self._lane.overlaps_launches
        split = None
        if config.tp_size == 1 and self._dtype is torch.bfloat16:
            split = SplitDecode(self.weights, shape.eps, options.split_rows, pdl=pdl)
        self._attention = ChunkAttention(
            shape.num_heads, shape.kv_heads, shape.head_dim, shape.attention_scale
        )
        self._dense = cudnn_serves(self._dtype, shape.head_dim, self.device)
        self.model = CudaModel(
            self.weights,
            shape,
            RankCollectives(rank, config.tp_size),
            self._attention,
            pdl=pdl,
            split=split,
        )
        self._previous: list[int | None] = []
        #: Raises when another rank is gone; asked while a step is waited for.
        self.watch: Callable[[], None] | None = None
        #: Bytes that were free once the weights were loaded; 0 when the pool's size was given.
        self.free_after_weights = 0

    # --- setting up ------------------------------------------------------------------------------

    def choose_num_blocks(self) -> int:
        """How many blocks fit on this rank beside weights and working memory."""
        if self.config.num_blocks or self.config.kv_memory_bytes:
            return num_kv_blocks(self.config, self.model_config)
        torch.cuda.empty_cache()
        self.free_after_weights, _ = torch.cuda.mem_get_info(self.device)
        return blocks_that_fit(
            free_bytes=self.free_after_weights,
            working_bytes=self._measure_working_memory(),
            block_bytes=block_bytes(self.config, self.model_config),
            share=MEMORY_SHARE,
            reserve_bytes=RESERVE_BYTES + self.config.spare_bytes,
        )

    def _measure_working_memory(self) -> int:
        """Everything but weights and KV at the peak of the largest step of prompt tokens."""
        options, block_size = self.options, self.config.block_size
        probes = largest_prompts(
            max_tokens=options.max_chunk_tokens,
            max_sequences=options.max_batch,
            max_model_len=self.max_model_len,
            block_size=block_size,
        )
        before = torch.cuda.memory_allocated(self.device)
        self.open(1)
        torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode(), self._lane.active():
            counts = [len(probe.block_ids) for probe in probes]
            chunks = self._uploader.upload(probes, counts, block_size)
            self._forward_chunks(0, chunks, next(iter(self._cuts.values())))
        self._lane.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if self._pieces is not None:
            shape = self._shape
            width = 3 * shape.intermediate + 2 * shape.hidden
            peak += self._piece_sizes[-1] * width * self._dtype.itemsize
        self._close_pool()
        return peak

    def open(self, num_blocks: int) -> None:
        """Make the KV pool, and what steps need beside it."""
        config, options = self.config, self.options
        self.layout = kv_layout(config, self.model_config, num_blocks)
        self._limits = BatchLimits(
            block_size=config.block_size,
            num_blocks=num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_batch=options.max_batch,
            max_chunk_tokens=options.max_chunk_tokens,
            pinned=self.device.type == "cuda",
        )
        device, batch, shape = self.device, options.max_batch, self._shape
        self._graphs_on = device.type == "cuda"
        self.pool = KVPool(self.layout, self._rank, self._dtype, device)
        # However few blocks there are: any number of sequences may share those of a long prefix.
        table = batch * -(-self.max_model_len // config.block_size)
        self._rows = DecodeRows(batch, table, device)
        self._uploader = ChunkUploader(
            options.max_chunk_tokens, batch, table, device, dense=self._dense
        )
        self._sampler = TokenSampler(batch, self.vocab_size, shape, device)
        self._out = StagingRing(batch + 1, 4, device)
        self._batches = graph_batches(batch)
        self._cuts = {
            (n, long): decode_shape(n, shape.kv_heads, shape.head_dim, long)
            for n in self._batches
            for long in (False, True)
        }
        parts = max(n * cut.splits for (n, _), cut in self._cuts.items())
        self._scratch = DecodeScratch(batch, parts, shape.num_heads, shape.head_dim, device)
        self._graphs = GraphSet(self._decode, self._lane)
        with_pieces = self._graphs_on and options.prompt_graphs and config.tp_size == 1
        self._pieces = self._make_pieces() if with_pieces else None
        if device.type == "cuda":
            # All this was filled on another stream than the one that steps run on.
            torch.cuda.synchronize(device)

    def start(self, comm: RankCollectives | None = None) -> None:
        """Join the other ranks, plan prompt attention, capture the decode graphs."""
        self.model.comm = comm or RankCollectives()
        self.plan_attention(self.options.max_batch)
        with torch.inference_mode():
            if self._graphs_on:
                sizes = reversed(self._batches)
                self._graphs.capture_all((n, long) for n in sizes for long in (False, True))
            if self._pieces is not None:
                self._pieces.capture(self.layout.num_layers)

    def plan_attention(self, max_prompts: int) -> None:
        """Plan attention of up to `max_prompts` long prompts at once, for steps of this thread."""
        if self._dense:
            longest = min(self.options.max_chunk_tokens, self.max_model_len)
            with torch.inference_mode(), self._lane.active():
                self._attention.make_plans(longest, max_prompts, self._dtype, self.device)

    def _make_pieces(self) -> PromptPieces | None:
        self._piece_sizes = piece_sizes(self.options.max_chunk_tokens)
        if not self._piece_sizes:
            return None
        shape, layers = self._shape, self.pool.layers

        def between(layer: int, *buffers: Tensor) -> None:
            self.model.between(layer, layers, *buffers)

        widths = shape.hidden, shape.num_heads * shape.head_dim, shape.qkv_width
        return PromptPieces(
            self._piece_sizes, widths, between, self._lane, self._dtype, self.device
        )

    def _close_pool(self) -> None:
        del self.pool, self._rows, self._uploader, self._scratch, self._graphs, self._pieces
        torch.cuda.empty_cache()

    # --- running ---------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepPlan:
        """Check a batch and put it in device order; raises Internal when it is not sound."""
        return plan_step(batch, self._limits, self._previous)

    def submit(self, plan: StepPlan) -> PendingTokens:
        """Put a step on the stream. Its sampled tokens stay on the device for the next step."""
        rows = len(plan.sampled)
        logprobs = None
        marks = self.pool.step_events
        with torch.inference_mode(), self._lane.active():
            if marks is not None:
                marks.begin()
            logits, hidden = self._forward(plan)
            number = 0 if marks is None else marks.end()
            buffer, _, index = self._out.take()
            if logits is not None:
                tokens, logprobs = self._sampler(logits, plan, self._rows, self.model.comm)
                buffer[:rows].copy_(tokens, non_blocking=True)
            buffer[rows] = 0
            if self.model.comm.failed is not None:
                buffer[rows : rows + 1].copy_(self.model.comm.failed, non_blocking=True)
            pending = PendingTokens(
                self._out,
                buffer[: rows + 1],
                index,
                plan,
                None if logprobs is None else to_host(logprobs),
                None if hidden is None else self._score(hidden, plan),
                self.watch,
                number,
            )
            self._out.sent(index)
        self._previous = plan.results
        return pending

    def _score(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """The table of the targets' log-probabilities, a few rows of logits at a time."""
        assert plan.scored is not None
        whole, comm = self._sampler.whole, self.model.comm
        table = plan.scored.table(
            lambda part: whole(self.model.logits(hidden[part]), comm),
            to_device(plan.scored.targets, self.device),
        )
        assert table is not None
        return to_host(table)

    def launch(self, batch: StepBatch) -> PendingTokens:
        """`prepare` and `submit`."""
        return self.submit(self.prepare(batch))

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step to its end."""
        return self.launch(batch).wait()

    def follow_step(self, batch: StepBatch) -> None:
        """Run this rank's part of a step that rank 0 has launched. Raises RankLost when an earlier
        step on this rank gave up waiting for a peer, as `wait` does on rank 0."""
        while self._followed and self._followed[0].is_over:
            self._followed.popleft().check_peers()
        self._followed.append(self.launch(batch))

    def use_threads(self, count: int) -> None:
        """Nothing: a step takes one thread, which launches."""

    def enter_thread(self) -> None:
        """Plan prompt attention again: what the thread that loaded has planned is its own. Equally
        long prompts in one step are too rare to start later for."""
        self._lane.enter_thread()
        self.plan_attention(1)

    def warmup_batches(self) -> list[StepBatch]:
        """Steps that have every kernel compiled that a step can need."""
        return warmup_steps(
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )

    def close(self) -> None:
        """Leave the tensor-parallel group; a step that waits for a lost rank is given up."""
        if not self._peer_is_lost():
            self._lane.synchronize()
        self.model.comm.close()

    def _peer_is_lost(self) -> bool:
        try:
            if self.watch is not None:
                self.watch()
        except RankLost:
            return True
        return False

    def _forward(self, plan: StepPlan) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the sampled rows, and hidden states of those that are scored."""
        count = len(plan.decodes)
        if not plan.results:
            return None, None
        self._rows.upload(plan.decodes, plan.feeds, plan.decode_blocks, plan.sampled)
        bucket = next_size(self._batches, max(count, 1)) or self.options.max_batch
        if not plan.chunks:
            if self._graphs_on:
                return self._graphs.replay(bucket, plan.long_context)[:count], None
            return self._decode(bucket, plan.long_context)[:count], None
        rows = None
        if self._pieces is not None and count == 0:
            rows = next_size(self._piece_sizes, sum(len(step.tokens) for step in plan.chunks))
        chunks = self._uploader.upload(
            plan.chunks, plan.chunk_blocks, self.config.block_size, rows or 0
        )
        pieces = self._pieces if rows else None
        return self._forward_chunks(count, chunks, self._cuts[bucket, plan.long_context], pieces)

    def _forward_chunks(
        self,
        decodes: int,
        chunks: ChunkRows,
        cut: DecodeShape,
        pieces: PromptPieces | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        out = self.model.step(
            self._rows,
            decodes,
            self._sampler.tokens,
            chunks,
            self.pool.layers,
            self._scratch,
            cut,
            (lambda layer: None) if self.pool.step_events is None else self.pool.step_events.mark,
            pieces,
        )
        self.model.comm.end_step()
        return out

    def _decode(self, batch: int, long_context: bool) -> Tensor:
        logits = self.model.decode(
            self._rows,
            batch,
            self._sampler.tokens,
            self.pool.layers,
            self._scratch,
            self._cuts[batch, long_context],
        )
        self.model.comm.end_step()
        return logits
