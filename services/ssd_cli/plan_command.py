"""The command ``ssd plan``: its flags, its table and its JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from ssd.engine.parallel.shard import SIZES
from ssd.engine.pass_time import Cpu
from ssd.errors import ModelNotFoundError, SettingsError, UnsupportedModelError
from ssd_cli.commands import program
from ssd_cli.display import out, plain_table, print_table, write
from ssd_cli.options import Json, Shape, with_flags
from ssd_cli.plan import (
    BatchEstimate,
    MemoryEstimate,
    PairEstimate,
    PlanOptions,
    make_plan,
    verdicts,
)
from ssd_cli.shapes import shape_of

MAX_BATCH = 1024
MIN_BANDWIDTH = 0.001
"""GB/s, below which times overflow."""
WARNING = (
    "All times are predictions of a model with the assumptions above, not measurements of this "
    "machine."
)


@with_flags
def plan_command(
    *,
    model: Annotated[
        str, typer.Option(help="Target: a known shape, a folder, demo://target or hf://…")
    ] = "llama-3.1-70b",
    draft: Annotated[str, typer.Option(help="Draft, named as the target.")] = "llama-3.2-1b",
    gpu: Annotated[str, typer.Option(help="H100, H100-PCIe, H200, A100-80GB, …")] = "H100",
    tp: Annotated[
        int, typer.Option(min=1, max=8, help="GPUs of the target (tensor parallelism).")
    ] = 4,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,16",
    shape: Shape,
    max_model_len: Annotated[
        int, typer.Option(min=0, help="Tokens of a sequence; 0: of the models, at most 4,096.")
    ] = 0,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that a proposed token is accepted.")
    ] = 0.8,
    hit_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Rounds whose outcome is in the table.")
    ] = 0.9,
    overhead_ms: Annotated[
        float,
        typer.Option(min=0.0, max=1000.0, help="Host and transport of a round that nothing hides."),
    ] = 0.3,
    draft_device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Device of the draft; cpu needs no GPU for it.")
    ] = "cuda",
    cpus: Annotated[int, typer.Option(min=0, max=1024, help="CPU cores of a draft on CPUs.")] = 0,
    bandwidth: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100_000.0,
            help="Memory bandwidth of these cores in GB/s, as a plain read reaches it: that of "
            "their socket.",
        ),
    ] = 0.0,
    amx: Annotated[bool, typer.Option("--amx", help="These cores have AMX.")] = False,
    draft_weights: Annotated[
        Literal["bfloat16", "int8", "int4"],
        typer.Option(help="Format of the weights of a draft on CPUs."),
    ] = "bfloat16",
    is_json: Json = False,
) -> None:
    """Predict memory and speed of a pair on GPUs. No GPU and no weights are needed.

    Exit code 1 if the pair does not fit.
    """
    for flag, source in (("--model", model), ("--draft", draft)):
        try:
            shape_of(source)
        except (ModelNotFoundError, UnsupportedModelError) as error:
            raise typer.BadParameter(f"{flag} {error}") from None
    options = PlanOptions(
        model=model,
        draft=draft,
        gpu=gpu,
        num_gpus=_tensor_parallel(tp),
        batches=_batches(batch),
        lookahead=shape.lookahead,
        branches=shape.branches,
        max_model_len=max_model_len,
        acceptance=acceptance,
        hit_rate=hit_rate,
        overhead_ms=overhead_ms,
        draft_cpu=_cpu(draft_device, cpus, bandwidth, draft_weights, has_amx=amx),
        draft_weights=draft_weights,
    )
    try:
        plan = make_plan(options)
    except SettingsError as error:
        # The flag of this command has a shorter name than the setting of a target.
        raise typer.BadParameter(str(error).replace("tensor_parallel_size", "--tp")) from None
    if is_json:
        write(json.dumps(as_json(plan, options)) + "\n")
    else:
        print_table(out, memory_table(plan, options))
        out.print()
        print_table(out, speed_table(plan))
        out.print()
        for line in (*verdicts(plan, options), f"assumed: {assumptions(options)}", WARNING):
            out.print(line)
    if not plan.fits:
        raise typer.Exit(1)


def _tensor_parallel(size: int) -> int:
    if size not in SIZES:
        raise typer.BadParameter(f"--tp {size} is not one of {', '.join(map(str, SIZES))}")
    return size


def _cpu(device: str, cpus: int, bandwidth: float, weights: str, *, has_amx: bool) -> Cpu | None:
    if 0 < bandwidth < MIN_BANDWIDTH:
        raise typer.BadParameter(f"--bandwidth {bandwidth:g}: must be at least {MIN_BANDWIDTH}")
    if device == "cpu" and cpus and bandwidth:
        return Cpu(num_cores=cpus, bandwidth=bandwidth * 1e9, has_amx=has_amx)
    if device == "cpu" or cpus or bandwidth or has_amx or weights != "bfloat16":
        raise typer.BadParameter(
            "--draft-device cpu, --cpus and --bandwidth: give all three for a draft on CPUs, which "
            "--amx and --draft-weights are for"
        )
    return None


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_BATCH for part in parts):
        raise typer.BadParameter(
            f"--batch {text!r} is not a list of numbers in 1..{MAX_BATCH}, for example 1,8,16"
        )
    return tuple(sorted({int(part) for part in parts}))


def assumptions(options: PlanOptions) -> str:
    """Return the inputs that a user should replace by measurements."""
    return (
        f"--acceptance {options.acceptance:g}, --hit-rate {options.hit_rate:g}, --overhead-ms "
        f"{options.overhead_ms:g} (a goal), no proposal after a miss, contexts of half the maximum "
        "length, bfloat16. Acceptance and hit rate depend on the pair and its texts: measure yours "
        f"with {program()} generate"
    )


def as_json(plan: PairEstimate, options: PlanOptions) -> dict[str, Any]:
    """Return all inputs and results; times in seconds, sizes in bytes."""
    return {
        "options": asdict(options),
        "gpu": asdict(plan.gpu),
        "max_model_len": plan.max_model_len,
        "fits": plan.fits,
        "target_memory": asdict(plan.target) | {"total": plan.target.total},
        "draft_memory": asdict(plan.draft) | {"total": plan.draft.total},
        "batches": [asdict(batch) for batch in plan.batches],
        "verdicts": list(verdicts(plan, options)),
    }


_MEMORY_ROWS: tuple[tuple[str, Callable[[MemoryEstimate], int]], ...] = (
    ("weights", lambda memory: memory.weights),
    ("KV cache of {batch} sequences of {length} tokens", lambda memory: memory.kv_cache),
    ("KV entries of branches", lambda memory: memory.segments),
    ("logits of branches", lambda memory: memory.branch_logits),
    ("CUDA graphs (estimate) and their logits", lambda memory: memory.graphs),
    ("CUDA and libraries (estimate)", lambda memory: memory.runtime),
    ("sum", lambda memory: memory.total),
)


def memory_table(plan: PairEstimate, options: PlanOptions) -> Table:
    """Return the memory of a GPU of the target and of the draft's GPU."""
    place = "draft" if plan.draft_cpu is None else "draft (host)"
    table = plain_table(
        f"GB on each {plan.gpu.name} ({plan.gpu.memory_bytes / 1e9:.0f} GB)",
        right=(f"target (each of {options.num_gpus})", place),
    )
    for title, amount in _MEMORY_ROWS:
        label = title.format(batch=max(options.batches), length=plan.max_model_len)
        cells = [f"{amount(memory) / 1e9:.1f}" for memory in (plan.target, plan.draft)]
        table.add_row(label, *cells)
    return table


_SPEED_ROWS: tuple[tuple[str, Callable[[BatchEstimate], str]], ...] = (
    ("verify: pass of the target, ms", lambda batch: f"{batch.times.verify * 1000:.1f}"),
    ("table: passes of the draft, ms", lambda batch: f"{batch.times.table * 1000:.1f}"),
    ("columns of a table that a round uses", lambda batch: str(batch.columns)),
    ("round of SSD, ms", lambda batch: f"{batch.speculative.round_seconds * 1000:.1f}"),
    ("tokens per round and sequence", lambda batch: f"{batch.speculative.tokens_per_round:.2f}"),
    ("tokens/s AR (no draft)", lambda batch: f"{batch.plain.tokens_per_second:.0f}"),
    (
        "tokens/s SD (draft, then verify)",
        lambda batch: f"{batch.synchronous.tokens_per_second:.0f}",
    ),
    (
        "tokens/s SSD (draft beside verify)",
        lambda batch: f"{batch.speculative.tokens_per_second:.0f}",
    ),
    ("efficiency of SSD (verify / round)", lambda batch: f"{batch.speculative.efficiency:.2f}"),
)


def speed_table(plan: PairEstimate) -> Table:
    """Return the predictions, one column for each batch size."""
    titles = (f"batch {batch.batch}" for batch in plan.batches)
    table = plain_table("predicted, whole batch", right=titles)
    for label, cell in _SPEED_ROWS:
        table.add_row(label, *(cell(batch) for batch in plan.batches))
    return table
