"""One rank of an engine on a GPU: its model, its KV pool, its graphs, and how a step runs.

A step is planned (`prepare`), its numbers are copied to the device, and one forward pass is put on
the stream (`submit`): as a CUDA graph where its shape has one, kernel by kernel where it is so
large that it outlasts its launches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.cuda.attention import DecodeAttention, LargeStepAttention, MixedAttention
from engine.cuda.comm import RankCollectives
from engine.cuda.memory import (
    MEMORY_SHARE,
    RESERVE_BYTES,
    StepMemory,
    blocks_that_fit,
)
from engine.cuda.model import CudaModel, RankShape
from engine.cuda.options import CudaOptions, StepShape, StepShapes
from engine.cuda.pending import PendingTokens
from engine.cuda.plan import AttentionPlanner, BatchLimits, ChunkLayout, StepPlan, plan_step
from engine.cuda.products.blas import with_faster_library
from engine.cuda.products.matrices import Matrix, device_matrix, multiplies_codes, with_copies
from engine.cuda.products.single import CodedProducts, SplitProducts, matrices_of
from engine.cuda.products.split_decode import SplitDecode
from engine.cuda.splits import SplitPlanner
from engine.cuda.staging import DeviceStream, GraphSet, to_device, to_host
from engine.cuda.warmup import largest_prompts, warmup_steps
from engine.errors import RankLost
from engine.kernels.triton.coded import CodedWeight
from engine.kv.pool import KVPool
from engine.kv.sizing import block_bytes, context_length, kv_layout, num_kv_blocks
from engine.model.config import ModelConfig
from engine.model.kv_groups import group_layers
from engine.model.matrices import WeightSource, matrix_reader
from engine.model.sharding import rank_heads, share_of
from engine.model.weights import ModelWeights, WeightLoader
from engine.quantization.weight import dense
from protocol.kv_layout import KVLayout


class CudaRunner:
    """Loads one rank's share, then runs steps on it. All ranks get the same batches in order.

    Between the two come `open` (the size of the KV pool is rank 0's decision) and `start` (with all
    ranks at once, for it captures collectives). Steps are put on a stream of the runner's own;
    `launch` never waits for the device.
    """

    depth = 2
    layout: KVLayout
    pool: KVPool
    _memory: StepMemory
    _limits: BatchLimits
    _planner: AttentionPlanner
    _splits: SplitPlanner
    _graphs: GraphSet
    _shapes: StepShapes

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
        self.max_model_len = context_length(config, model_config)
        self._kv_groups = group_layers(model_config, self.max_model_len)
        self._filled = self._kv_groups.filled()
        self._followed: deque[PendingTokens] = deque()  # a follower's steps not known to be over
        self.device = device or torch.device(config.device)
        self._stream = DeviceStream(self.device)
        share = share_of(model_config, rank, config.tp_size)
        self._shape = RankShape.of(model_config, share, config.tp_size, self._dtype)
        with torch.inference_mode():
            reader = matrix_reader(source, model_config, config.quantization, self._dtype)
            loader = WeightLoader(model_config, share, source, self.device, reader)
            codes = multiplies_codes(self._dtype, self.device)
            form = device_matrix if codes else dense
            weights: ModelWeights[Matrix] = loader.load(self.max_model_len, form)
            self.weights = with_copies(weights, self._bytes_beside_kv(), config.quantization)
        self.model = self._make_model(RankCollectives(rank, config.tp_size))
        self._previous: list[int | None] = []
        #: Raises when another rank is gone; polled while a step is waited for.
        self.watch: Callable[[], None] | None = None
        #: Called between the layers of a step that no graph serves.
        self.meanwhile: Callable[[], None] | None = None
        #: Bytes that were free once the weights were loaded; 0 when the pool's size was given.
        self.free_after_weights = 0

    def _make_model(self, comm: RankCollectives) -> CudaModel:
        """The model of one rank, with what runs its products."""
        pdl, options, shape = self._stream.overlaps_launches, self.options, self._shape
        coded = any(isinstance(matrix, CodedWeight) for matrix, _ in matrices_of(self.weights))
        split = products = None
        if coded or (comm.size == 1 and self._dtype is torch.bfloat16):
            few = SplitProducts(self.weights, options.split_rows, self.device, pdl=pdl)
            if comm.size == 1:
                split = SplitDecode(
                    self.weights,
                    shape.eps,
                    few,
                    activation=shape.activation,
                    post_norms=shape.post_norms,
                    pdl=pdl,
                )
            if coded:
                products = CodedProducts(few, self._dtype, pdl=pdl)
        return CudaModel(self.weights, shape, comm, pdl=pdl, split=split, coded=products)

    def _bytes_beside_kv(self) -> int:
        """Free memory of the device, less a pool whose size is given."""
        if self.device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        config, model = self.config, self.model_config
        if config.num_blocks is None and config.kv_memory_bytes is None:
            return free
        return free - num_kv_blocks(config, model) * block_bytes(config, model)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

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
        options, shape = self.options, self._shape
        probes = largest_prompts(
            max_tokens=options.max_chunk_tokens,
            max_sequences=options.max_batch,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_groups=len(self._kv_groups.groups),
        )
        before = torch.cuda.memory_allocated(self.device)
        self.open(1)
        torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode(), self._stream.active():
            plan = plan_step(StepBatch(sequences=tuple(probes)), self._limits, [])
            self._forward(replace(plan, layout=self._planner.lay_out(plan, ())))
        self._stream.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        values = max(self.step_rows, default=0) * (3 * shape.intermediate + 2 * shape.hidden)
        peak += values * self._dtype.itemsize
        del self.pool, self._memory, self._graphs
        torch.cuda.empty_cache()
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
            groups=self.layout.groups,
        )
        spans = rank_heads(self.model_config, config.tp_size)
        heads = {last - first for first, last in spans}
        self._shapes = StepShapes.of(options, min(heads))
        self.step_rows = self._shapes.mixed_rows
        stored: torch.dtype = getattr(torch, self.layout.dtype)
        self.pool = KVPool(self.layout, self.model.comm.rank, stored, self.device)
        self._memory = StepMemory.make(
            options,
            self._shapes,
            self._shape,
            self.model_config,
            self.weights,
            self.pool,
            self._stream,
            groups=self.layout.groups,
            max_model_len=self.max_model_len,
        )
        self._planner = self._memory.attention.planner(
            self.layout.groups,
            config.block_size,
            max_tokens=options.max_chunk_tokens,
            last=self._kv_groups.places[-1][0],
            rank_heads=heads,
        )
        self._splits = SplitPlanner(self._memory.attention.sizes, self.layout.groups, self._shapes)
        run = with_faster_library(self._run, self.device)
        self._graphs = GraphSet(run, self._stream, len(self._filled), self._mark_piece)
        if self.device.type == "cuda":
            # All this was filled on another stream than the one that steps run on.
            torch.cuda.synchronize(self.device)

    def start(self, comm: RankCollectives | None = None) -> None:
        """Join the other ranks, plan prompt attention, capture the graphs."""
        self.model.comm = comm or RankCollectives()
        self._plan_attention(self.options.max_batch)
        if self.device.type == "cuda":
            with torch.inference_mode():
                self._graphs.capture_all(sorted(self._shapes.all, key=lambda shape: -shape.rows))

    def _plan_attention(self, max_prompts: int) -> None:
        """Plan attention of up to `max_prompts` long prompts at once, for steps of this thread."""
        dense = self._memory.attention.dense
        if dense is not None:
            with torch.inference_mode(), self._stream.active():
                dense.make_plans(max_prompts)

    # --- running ---------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepPlan:
        """Check a batch and put it in device order; raises Internal when it is not sound."""
        plan = plan_step(batch, self._limits, self._previous)
        if plan.chunks:
            plan = replace(plan, layout=self._planner.lay_out(plan, self._shapes.mixed))
        return replace(plan, splits=self._splits.plan(plan))

    def submit(self, plan: StepPlan) -> PendingTokens:
        """Put a step on the stream. Its sampled tokens stay on the device for the next step."""
        memory, comm = self._memory, self.model.comm
        rows = len(plan.sampled)
        logprobs = None
        events, results = self.pool.step_events, memory.results
        with torch.inference_mode(), self._stream.active():
            if events is not None:
                events.begin()
            results.begin()
            logits, hidden = self._forward(plan)
            number = 0 if events is None else events.end()
            if rows:
                assert logits is not None
                logprobs = memory.sampler(logits[:rows], plan, memory.decodes, comm)
            pending = results.fetch(
                plan,
                tokens=memory.sampler.tokens,
                damaged=None if plan.layout is None else memory.chunks.damaged,
                failed=comm.failed,
                logprobs=None if logprobs is None else to_host(logprobs),
                scores=None if hidden is None else self._score(hidden, plan),
                watch=self.watch,
                number=number,
            )
        self._previous = plan.results
        return pending

    def _forward(self, plan: StepPlan) -> tuple[Tensor | None, Tensor | None]:
        """Logits, the sampled rows first, and hidden states of those that are scored."""
        if not plan.results:
            return None, None
        memory, layout = self._memory, plan.layout
        if layout is None:
            shape = self._shapes.for_decodes(len(plan.decodes), long_context=plan.long_context)
        else:
            memory.chunks.upload(plan, layout, self.config.block_size)
            if layout.shape is None:
                return self._run_large(plan, layout)
            shape = layout.shape
        memory.decodes.upload(plan)
        return self._graphs.run(shape), None

    def _run(self, shape: StepShape) -> Tensor:
        """Logits of a step of that shape, whose numbers are on the device."""
        memory, rows = self._memory, shape.rows
        previous = memory.sampler.tokens
        if shape.chunk_programs:
            chunks, begins = memory.chunks, self._graphs.begins
            logits = self.model.logits_of_step(
                chunks.tokens[:rows],
                chunks.feed[:rows],
                previous,
                MixedAttention(memory.attention, memory.decodes, chunks, shape, begins),
                memory.logits[: shape.samples],
                chunks.kept[: shape.samples],
            )
        else:
            decodes, long = memory.decodes, shape.long_context
            attention = DecodeAttention(memory.attention, decodes, rows, long)
            logits = self.model.logits_of_step(
                decodes.tokens[:rows],
                decodes.feed[:rows],
                previous,
                attention,
                memory.logits[:rows],
            )
        self.model.comm.end_step()
        return logits

    def _run_large(
        self, plan: StepPlan, layout: ChunkLayout
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits and hidden states of a step with chunks that no graph serves."""
        memory, model, rows = self._memory, self.model, layout.rows
        chunks = memory.chunks
        shape = self._shapes.for_decodes(len(plan.decodes), long_context=plan.long_context)
        attention = LargeStepAttention(
            DecodeAttention(memory.attention, memory.decodes, shape.rows, shape.long_context),
            chunks,
            layout,
            len(plan.decodes),
            self._mark_written,
        )
        h = model.embed(chunks.tokens[:rows], chunks.feed[:rows], memory.sampler.tokens)
        kept = chunks.kept[: len(layout.kept)]
        if plan.decodes:
            memory.decodes.upload(plan)
        h = model.hidden(h, attention, kept, layout.overhang)
        if not plan.decodes:  # only sampling reads them: the device does not wait
            memory.decodes.upload(plan)
        sampled = len(plan.sampled)
        logits = model.logits(h[:sampled]) if sampled else None
        model.comm.end_step()
        return logits, h[sampled:] if plan.scored is not None else None

    def _mark_written(self, layer: int) -> None:
        """A layer's KV is on the stream."""
        if self.pool.step_events is not None and self._filled[layer]:
            self.pool.step_events.mark(self._filled[layer][-1])
        if self.meanwhile is not None:
            self.meanwhile()

    def _mark_piece(self, layers: slice) -> None:
        """The KV of these layers, and of those before, is on the stream."""
        slots = [slots[-1] for slots in self._filled[layers] if slots]
        if self.pool.step_events is not None and slots:
            self.pool.step_events.mark(slots[-1])

    def _score(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """The table of the targets' log-probabilities, a few rows of logits at a time."""
        assert plan.scored is not None
        whole, comm = self._memory.sampler.whole, self.model.comm
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
        """Plan prompt attention again: plans belong to the thread that makes them. Equally long
        prompts in one step are too rare to start later for."""
        self._stream.enter_thread()
        self._plan_attention(1)

    def warmup_batches(self) -> list[StepBatch]:
        """Steps that have every kernel compiled that a step can need."""
        return warmup_steps(
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            max_chunk_tokens=self.options.max_chunk_tokens,
            vocab_size=self.vocab_size,
            graph_tokens=max(self.step_rows, default=0),
            max_sequences=self.options.max_batch,
            num_groups=len(self._kv_groups.groups),
        )

    def close(self) -> None:
        """Leave the tensor-parallel group; a step that waits for a lost rank is abandoned."""
        if not self._peer_is_lost():
            self._stream.synchronize()
            self._graphs.close()
        self.model.comm.close()

    def _peer_is_lost(self) -> bool:
        try:
            if self.watch is not None:
                self.watch()
        except RankLost:
            return True
        return False
