"""``ssd plan``: memory and predicted speed of a pair on GPUs. Nothing is loaded or started.

A draft may also run on CPUs. Mode SYNCHRONOUS, with which SSD is compared, then has its draft on a
GPU of the target: that needs no other hardware either.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from ssd.engine.config import (
    LARGEST_PAGE,
    STATIC,
    EngineConfig,
    ModelConfig,
    length_limit,
    sequence_buckets,
)
from ssd.engine.parallel.shard import SIZES, check_shards
from ssd.engine.pass_time import (
    DTYPE,
    GPUS,
    Cpu,
    Gpu,
    PassShape,
    cpu_pass_time,
    kv_shards,
    pass_time,
    weight_format,
)
from ssd.engine.pass_time import STATIC as KERNELS
from ssd.engine.sizes import (
    branch_logits_bytes,
    bytes_per_entry,
    graph_output_bytes,
    num_weights,
    pass_weights,
    segment_entries,
)
from ssd.errors import SettingsError
from ssd.speculation.speed_model import (
    PairTimes,
    Rates,
    Speed,
    plain_speed,
    speculative_speed,
    synchronous_speed,
    tokens_per_round,
)
from ssd_cli.shapes import shape_of

BYTES_PER_WEIGHT = 2
MAX_PADDING = 1024
"""Embeddings of one tokenizer differ by less: 152,064 and 151,936 rows in models of Qwen2.5."""
RUNTIME_BYTES = 1_000_000_000
"""An estimate of what CUDA, its libraries and the allocator occupy."""
GRAPH_KERNEL_BYTES = 64 << 10
"""An estimate of the device memory of one kernel of a CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan."""

    model: str
    draft: str
    gpu: str
    num_gpus: int
    """GPUs of the target; the draft has one of its own unless it runs on CPUs."""
    batches: tuple[int, ...]
    lookahead: int
    branches: int
    max_model_len: int
    """0: that of the model, at most 4,096."""
    acceptance: float
    hit_rate: float
    overhead_ms: float
    draft_cpu: Cpu | None = None
    """Where the draft runs; None: on a GPU."""
    draft_weights: str = DTYPE
    """Format of the weights of a draft on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one GPU, or of the host for a draft on CPUs."""

    weights: int
    kv_cache: int
    """KV cache of the largest batch of sequences of maximum length."""
    segments: int
    """KV entries of the proposals and branches of a draft."""
    branch_logits: int
    graphs: int
    """CUDA graphs, an estimate, and the logits that they return."""
    runtime: int
    """CUDA, libraries and allocator; an estimate, also for a process without CUDA."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """Predictions for one batch size."""

    batch: int
    columns: int
    """Columns of a table that a round uses: with more of them, it would wait too long."""
    times: PairTimes
    """Times of whole tables."""
    plain: Speed
    synchronous: Speed
    speculative: Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEstimate:
    """The result."""

    gpu: Gpu
    max_model_len: int
    target: MemoryEstimate
    draft: MemoryEstimate
    draft_cpu: Cpu | None
    batches: tuple[BatchEstimate, ...]

    @property
    def on_gpus(self) -> Sequence[tuple[str, MemoryEstimate]]:
        """Names and memory of the models that run on GPUs."""
        target = (("target", self.target),)
        return target if self.draft_cpu is not None else (*target, ("draft", self.draft))

    @property
    def fits(self) -> bool:
        """Whether models fit on their GPUs with the KV cache of the largest batch."""
        return all(memory.total <= self.gpu.memory_bytes for _, memory in self.on_gpus)


def make_plan(options: PlanOptions) -> PairEstimate:
    """Estimate a pair.

    Raises:
        ModelNotFoundError: a name is not a known shape, and no ``config.json`` is on this machine.
        UnsupportedModelError: the engine does not support a model.
        SettingsError: unknown GPU, a pair with different vocabularies, heads that cannot be
            divided, or a length over that of a model.
    """
    gpu = GPUS.get(options.gpu.lower())
    if gpu is None:
        known = ", ".join(offered.name for offered in GPUS.values())
        raise SettingsError(f"--gpu {options.gpu!r} is not known; known: {known}")
    target, draft = shape_of(options.model), shape_of(options.draft)
    if abs(target.vocab_size - draft.vocab_size) > MAX_PADDING:
        raise SettingsError(
            f"--draft {options.draft} has {draft.vocab_size} token ids, --model {options.model} "
            f"has {target.vocab_size}: a pair needs the same tokenizer"
        )
    of_target, of_draft = memory_of(options)
    return PairEstimate(
        gpu=gpu,
        max_model_len=_context_limit(options),
        target=of_target,
        draft=of_draft,
        draft_cpu=options.draft_cpu,
        batches=tuple(_batch_plan(options, target, draft, gpu, batch) for batch in options.batches),
    )


def memory_of(options: PlanOptions) -> tuple[MemoryEstimate, MemoryEstimate]:
    """Return the memory of each GPU of the target, and that of the draft.

    Raises:
        SettingsError: heads that cannot be divided, or a length over that of a model.
    """
    target, draft = shape_of(options.model), shape_of(options.draft)
    check_shards(target, options.num_gpus)
    engine = EngineConfig(
        max_model_len=_context_limit(options),
        max_num_seqs=max(options.batches),
        num_columns=options.lookahead + 1,
        dtype=DTYPE,
        engine=STATIC,
        block_size=LARGEST_PAGE,
    )
    draft_engine = replace(engine, branches=options.branches)
    if options.draft_cpu is not None:
        dtype = DTYPE if options.draft_weights == DTYPE else "float32"
        draft_engine = replace(draft_engine, engine="openvino", dtype=dtype)
    of_draft = _memory(draft, draft_engine, 1)
    if options.draft_cpu is not None:
        # The rows of an embedding of its own are stored as the head.
        stored = weight_format(options.draft_weights, options.draft_cpu)
        embedding = num_weights(draft) - pass_weights(draft)
        num_bytes = stored.bytes_of_pass(draft) + embedding * stored.bytes_per_head_weight
        of_draft = replace(of_draft, weights=int(num_bytes), graphs=0)
    return _memory(target, engine, options.num_gpus), of_draft


def _memory(model: ModelConfig, engine: EngineConfig, num_gpus: int) -> MemoryEstimate:
    """Return the memory of each GPU of a model."""
    entry_bytes = bytes_per_entry(model, engine.kv_dtype)
    blocks = 1 + engine.max_num_seqs * engine.blocks_per_sequence
    is_draft = engine.branches > 0
    return MemoryEstimate(
        weights=num_weights(model) * BYTES_PER_WEIGHT // num_gpus,
        kv_cache=blocks * engine.block_size * entry_bytes // kv_shards(model, num_gpus),
        segments=segment_entries(engine) * entry_bytes,
        branch_logits=branch_logits_bytes(model, engine) if is_draft else 0,
        graphs=_graph_bytes(model, engine, num_gpus),
        runtime=RUNTIME_BYTES,
    )


def _graph_bytes(model: ModelConfig, engine: EngineConfig, num_gpus: int) -> int:
    """Estimate the memory of CUDA graphs: of each number of sequences and kind of pass."""
    paged = KERNELS.of(model, is_tree=False, num_gpus=num_gpus)
    tree = KERNELS.of(model, is_tree=True)
    of_sequences = (1 + len(engine.branch_counts)) * tree if engine.branches else paged
    kernels = paged + len(sequence_buckets(engine)) * of_sequences
    return kernels * GRAPH_KERNEL_BYTES + graph_output_bytes(model, engine) // num_gpus


def _batch_plan(
    options: PlanOptions, target: ModelConfig, draft: ModelConfig, gpu: Gpu, batch: int
) -> BatchEstimate:
    times = round_times(target, draft, gpu, options, batch)

    def rates(columns: int) -> Rates:
        # The proposal after a miss depends on the text (n-grams), so none is counted.
        return Rates(
            tokens_after_draft=tokens_per_round(options.acceptance, columns),
            hit_rate=options.hit_rate,
            tokens_after_miss=1.0,
            waits_after_miss=False,
        )

    def speculative(columns: int) -> Speed:
        part = replace(times, table=times.table * columns / options.lookahead)
        return speculative_speed(part, rates(columns), batch)

    # A target waits for a column only while that raises its speed.
    columns = max(range(1, options.lookahead + 1), key=lambda n: speculative(n).tokens_per_second)
    return BatchEstimate(
        batch=batch,
        columns=columns,
        times=times,
        plain=plain_speed(times, batch),
        synchronous=synchronous_speed(times, rates(options.lookahead), batch),
        speculative=speculative(columns),
    )


def round_times(
    target: ModelConfig, draft: ModelConfig, gpu: Gpu, options: PlanOptions, batch: int
) -> PairTimes:
    """Predict the times of a pair whose sequences have the middle of their length.

    The draft's step after its last one fills its KV cache while the table is sent, and is not part
    of the table's time.
    """
    context = _context_limit(options) // 2
    columns = options.lookahead + 1
    engine = EngineConfig(max_model_len=1, max_num_seqs=max(options.batches))
    # Passes are padded to few counts of sequences.
    padded = next(count for count in sequence_buckets(engine) if count >= batch)

    def seconds(model: ModelConfig, rows: int, num_gpus: int, *, is_tree: bool = False) -> float:
        shape = PassShape(
            rows=padded * rows, sequences=batch, context_tokens=context, is_tree=is_tree
        )
        return pass_time(model, gpu, shape, num_gpus=num_gpus).seconds

    def step() -> float:
        if options.draft_cpu is None:
            return seconds(draft, options.branches, 1, is_tree=True)
        rows = batch * options.branches
        shape = PassShape(rows=rows, sequences=batch, context_tokens=context, is_tree=True)
        weights = weight_format(options.draft_weights, options.draft_cpu)
        return cpu_pass_time(draft, options.draft_cpu, shape, weights)

    # Plain decoding is a verify without proposals, of the same shape.
    verify = seconds(target, columns, options.num_gpus)
    return PairTimes(
        plain=verify,
        verify=verify,
        # The fastest that SD can be: causal passes. Mode synchronous of this product runs steps of
        # a tree with one branch, which have more kernels.
        proposal=options.lookahead * seconds(draft, 1, 1),
        table=options.lookahead * step(),
        overhead=options.overhead_ms / 1000,
    )


def verdicts(plan: PairEstimate, options: PlanOptions) -> Sequence[str]:
    """Return whether the pair fits; if it does, whether SSD pays for each batch size, and why."""
    lines = []
    for name, memory in plan.on_gpus:
        free = plan.gpu.memory_bytes - memory.total
        if free < 0:
            lines.append(
                f"the {name} does not fit: {-free / 1e9:.1f} GB too much on each {plan.gpu.name}; "
                + _remedy(name, plan.gpu, options)
            )
    if not plan.fits:
        return lines
    theirs = "1" if plan.draft_cpu is None else f"{plan.draft_cpu.num_cores} CPUs"
    fits = f"the pair fits: {options.num_gpus} GPU(s) for the target and {theirs} for the draft"
    return [fits, *(_pays(batch, plan.gpu, options) for batch in plan.batches)]


def _remedy(name: str, gpu: Gpu, options: PlanOptions) -> str:
    """Return the smallest change with which a model fits, of those that this command can plan."""

    def fits(changed: PlanOptions) -> bool:
        try:
            target, draft = memory_of(changed)
        except SettingsError:
            return False
        return (target if name == "target" else draft).total <= gpu.memory_bytes

    largest = max(options.batches)
    if batch := _largest(largest - 1, lambda count: fits(replace(options, batches=(count,)))):
        return f"the largest --batch that fits is {batch}"
    single = replace(options, batches=(1,))
    pages = _context_limit(options) // LARGEST_PAGE
    if fitting := _largest(pages, lambda n: fits(replace(single, max_model_len=n * LARGEST_PAGE))):
        return f"with --batch 1, the largest --max-model-len that fits is {fitting * LARGEST_PAGE}"
    larger = [size for size in SIZES if size > options.num_gpus and name == "target"]
    changes = {f"use --tp {size}": replace(options, num_gpus=size) for size in larger}
    changes |= {f"use --tp {size} and --batch 1": replace(single, num_gpus=size) for size in larger}
    changes["with --batch 1, lower --branches or --lookahead"] = replace(
        single, branches=1, lookahead=1
    )
    otherwise = f"use a GPU with more memory or a smaller {name}"
    return next((words for words, changed in changes.items() if fits(changed)), otherwise)


def _largest(highest: int, is_right: Callable[[int], bool]) -> int:
    """Return the largest number of 1..highest that is right, if smaller ones are; 0 if none is."""
    return bisect.bisect_left(range(1, highest + 1), 1, key=lambda number: not is_right(number))


def _context_limit(options: PlanOptions) -> int:
    target, draft = shape_of(options.model), shape_of(options.draft)
    shorter = min(target, draft, key=lambda model: model.max_position_embeddings)
    return length_limit(options.max_model_len, shorter)


def _pays(batch: BatchEstimate, gpu: Gpu, options: PlanOptions) -> str:
    speed = batch.speculative.tokens_per_second
    over_plain = speed / batch.plain.tokens_per_second
    over_sd = speed / batch.synchronous.tokens_per_second
    table, verify = batch.times.table * 1000, batch.times.verify * 1000
    hidden = (
        f"a verify ({verify:.1f} ms) hides the table ({table:.1f} ms)"
        if table <= verify
        else f"the table ({table:.1f} ms) takes longer than a verify ({verify:.1f} ms), so a round "
        f"uses {batch.columns} of {options.lookahead} columns: "
        + _faster_table(batch, gpu, options)
    )
    word = "pays" if min(over_plain, over_sd) > 1 else "does not pay"
    return (
        f"batch {batch.batch}: SSD {word}: {over_plain:.2f} times AR, {over_sd:.2f} times SD; "
        f"{hidden}"
    )


def _faster_table(batch: BatchEstimate, gpu: Gpu, options: PlanOptions) -> str:
    """Return how a verify would hide the table."""
    target, draft = shape_of(options.model), shape_of(options.draft)

    def is_hidden(lookahead: int, branches: int) -> bool:
        changed = replace(options, lookahead=lookahead, branches=branches)
        times = round_times(target, draft, gpu, changed, batch.batch)
        return times.table <= times.verify

    if branches := _largest(options.branches - 1, lambda n: is_hidden(options.lookahead, n)):
        return f"with --branches {branches}, a verify would hide it"
    if lookahead := _largest(options.lookahead - 1, lambda k: is_hidden(k, options.branches)):
        return f"with --lookahead {lookahead}, a verify would hide it"
    return "use a smaller draft"
