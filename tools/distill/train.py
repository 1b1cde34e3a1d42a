"""Train the embedded pair: ``python -m tools.distill.train --output DIR``.

Each of nine stages reads the folders of earlier stages and writes its own, so each can be repeated
alone:

- ``tokenizer``;
- ``target`` and ``draft``: both models, trained on text;
- ``sample``: text that the target generates;
- ``distil``: the draft, trained towards the distribution of the target on both texts;
- ``agree``: both models, the target also towards its draft;
- ``sample-again`` and ``distil-again``: as above, with the changed target;
- ``evaluate``: figures of the pair before and after ``agree``.

``tools.distill.package`` makes the packaged folders of their results.

With glibc, ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=268435456`` in the
environment keeps freed tensors mapped, which saves a fifth of the time if page faults are slow.
``GOMP_SPINCOUNT=20000`` limits the spinning of threads on shared cores.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.distill.evaluate import evaluate
from tools.distill.model import (
    DRAFT,
    TARGET,
    KeyValues,
    Shape,
    TrainableLlama,
    load_model,
    save_model,
    write_json,
)
from tools.distill.package import corpus_record
from tools.distill.training import Recipe, agreement_loss, learn, teacher_loss, text_loss, windows
from tools.distill.vocabulary import encode_modules, save_tokenizer, train_tokenizer
from torch import Tensor, nn

from ssd.demo.corpus import training_modules

logger = logging.getLogger(__name__)

STAGES = (
    "tokenizer",
    "target",
    "draft",
    "sample",
    "distil",
    "agree",
    "sample-again",
    "distil-again",
    "evaluate",
)

TARGET_RECIPE = Recipe(
    num_steps=1650,
    batch_size=8,
    length=512,
    adam_rate=3e-3,
    muon_rate=4e-3,
    warmup_steps=60,
    compiled=False,
)
DRAFT_RECIPE = Recipe(
    num_steps=450, batch_size=12, length=512, adam_rate=4e-3, muon_rate=6e-3, warmup_steps=40
)
DISTIL_RECIPE = Recipe(
    num_steps=700,
    batch_size=16,
    length=256,
    adam_rate=2e-3,
    muon_rate=4e-3,
    weight_decay=0.02,
    warmup_steps=30,
)
AGREE_RECIPE = Recipe(
    num_steps=300,
    batch_size=16,
    length=256,
    adam_rate=1e-3,
    muon_rate=1.5e-3,
    weight_decay=0.02,
    warmup_steps=15,
)
AGREEMENT_WEIGHT = 1.0
"""Weight of a nat of divergence between target and draft, relative to a nat of text."""
DISTIL_AGAIN_RECIPE = replace(DISTIL_RECIPE, num_steps=900, adam_rate=1.5e-3, muon_rate=2e-3)
NUM_SAMPLED_WINDOWS = 960
"""Windows of 256 tokens that the target generates in stage ``sample``."""
NUM_SAMPLED_AGAIN_WINDOWS = 480
"""Windows of 256 tokens that the target generates in stage ``sample-again``."""
SAMPLING_TEMPERATURES = (1.0, 0.6, 0.0)
"""The temperatures of the sampled windows, in turn."""


def train_vocabulary(output: Path) -> None:
    """Stage ``tokenizer``: write the tokenizer and the corpus as token ids."""
    modules = training_modules()
    tokenizer = train_tokenizer(module.text for module in modules)
    save_tokenizer(tokenizer, output / "tokenizer")
    stream_S = encode_modules(tokenizer, modules)
    save_file({"stream_S": stream_S}, output / "tokenizer" / "corpus.safetensors")
    write_json(output / "tokenizer" / "record.json", corpus_record(len(modules), len(stream_S)))
    logger.info("tokenizer: %d modules, %d tokens", len(modules), len(stream_S))


def read_stream(output: Path) -> Tensor:
    """Return the corpus as token ids, int64 [num_tokens]."""
    return load_file(output / "tokenizer" / "corpus.safetensors")["stream_S"]


def train_on_text(output: Path, name: str, shape: Shape, recipe: Recipe, seed: int) -> None:
    """Stages ``target`` and ``draft``: train on the corpus from random weights."""
    stream_S = read_stream(output)
    generator = torch.Generator().manual_seed(seed)
    model = TrainableLlama(shape)
    model.initialise(generator)
    progressed = learn(
        model, recipe, windows(stream_S, recipe, generator), text_loss(model), title=name
    )
    save_model(model, output / name)
    write_record(output / name, recipe, seed, asdict(progressed))


def write_record(folder: Path, recipe: Recipe, seed: int, results: dict[str, Any]) -> None:
    """Write ``training.json``: the recipe and the results of a stage, for the model card."""
    write_json(
        folder / "training.json",
        {
            "recipe": asdict(recipe),
            "num_tokens": recipe.num_tokens,
            "seed": seed,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": results,
        },
    )


@torch.no_grad()
def sample_windows(
    model: TrainableLlama, prompts_BS: Tensor, length: int, generator: torch.Generator
) -> Tensor:
    """Continue prompts, each at its own temperature (``SAMPLING_TEMPERATURES`` in turn).

    Args:
        model: The target.
        prompts_BS: int64, equally long prompts.
        length: Tokens of prompt and continuation together.
        generator: The source of the noise.

    Returns:
        int64 [B, length].
    """
    batch = prompts_BS.shape[0]
    temperature_B = torch.tensor(SAMPLING_TEMPERATURES).repeat(batch)[:batch]
    tokens_BS, fresh_BS = prompts_BS, prompts_BS
    past: KeyValues | None = None
    while tokens_BS.shape[1] < length:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BSV, past = model.extend(fresh_BS, past)
        logits_BV = logits_BSV[:, -1].float()
        noise_BV = -torch.empty_like(logits_BV).exponential_(generator=generator).log()
        fresh_BS = (logits_BV + temperature_B[:, None] * noise_BV).argmax(dim=-1, keepdim=True)
        tokens_BS = torch.cat((tokens_BS, fresh_BS), dim=1)
    return tokens_BS


def sample_from_target(output: Path, source: str, made: str, num_windows: int, seed: int) -> None:
    """Stages ``sample``: text that a target continues from training prompts, 257 tokens each.

    Args:
        output: Folder of all stages.
        source: The folder of the target in it.
        made: This stage's own folder.
        num_windows: Windows to write.
        seed: Determines prompts and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    model = load_model(output / source).eval()
    stream_S = read_stream(output)
    batch, pieces = 96, []
    for index in range(-(-num_windows // batch)):
        prompt_tokens = (32, 64, 96, 128)[index % 4]
        start_B = torch.randint(0, len(stream_S) - prompt_tokens, (batch,), generator=generator)
        prompts_BS = stream_S[start_B[:, None] + torch.arange(prompt_tokens)]
        pieces.append(sample_windows(model, prompts_BS, 257, generator))
        logger.info("sample: %d of %d windows", (index + 1) * batch, num_windows)
    sampled_BS = torch.cat(pieces)[:num_windows]
    (output / made).mkdir(parents=True, exist_ok=True)
    save_file({"sampled_BS": sampled_BS.contiguous()}, output / made / "sampled.safetensors")


def read_sampled(output: Path, source: str) -> Tensor:
    """Return what a ``sample`` stage wrote, int64 [num_windows, 257]."""
    return load_file(output / source / "sampled.safetensors")["sampled_BS"]


def mixed_batches(
    stream_S: Tensor, sampled_BS: Tensor, recipe: Recipe, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield batches of which one half is corpus text and the other the target's own."""
    half = recipe.batch_size // 2
    corpus = windows(stream_S, replace(recipe, batch_size=recipe.batch_size - half), generator)
    while True:
        order_N = torch.randperm(len(sampled_BS), generator=generator)
        for first in range(0, len(order_N) - half + 1, half):
            yield torch.cat((next(corpus), sampled_BS[order_N[first : first + half]]))


def distil(
    output: Path, sources: tuple[str, str, str], made: str, recipe: Recipe, seed: int
) -> None:
    """Stages ``distil``: train a draft towards a target's distribution.

    Args:
        output: Folder of all stages.
        sources: The folders of the target, of the draft and of the sampled text in it.
        made: This stage's own folder.
        recipe: Rates and lengths.
        seed: Determines the order of the batches.
    """
    target, draft, sampled = sources
    generator = torch.Generator().manual_seed(seed)
    student = load_model(output / draft)
    teacher = load_model(output / target).eval()
    sampled_BS = read_sampled(output, sampled)
    batches = mixed_batches(read_stream(output), sampled_BS, recipe, generator)
    progressed = learn(student, recipe, batches, teacher_loss(student, teacher), title=made)
    save_model(student, output / made)
    write_record(output / made, recipe, seed, asdict(progressed))


def agree(output: Path, recipe: Recipe, seed: int) -> None:
    """Stage ``agree``: train both models, the target on text and towards its draft.

    Pairs in use are trained separately. A draft of a million parameters is too small for the
    acceptance of a real pair, because its target is fourteen times as large. This stage therefore
    trains both towards each other. The model card contains the figures before and after.
    """
    generator = torch.Generator().manual_seed(seed)
    target, draft = load_model(output / "target"), load_model(output / "distil")
    sampled_BS = read_sampled(output, "sample")
    batches = mixed_batches(read_stream(output), sampled_BS, recipe, generator)
    num_text_rows = recipe.batch_size - recipe.batch_size // 2
    loss_of = agreement_loss(target, draft, AGREEMENT_WEIGHT, num_text_rows)
    pair = nn.ModuleList((target, draft))
    progressed = learn(pair, recipe, batches, loss_of, title="agree")
    save_model(target, output / "agree" / "target")
    save_model(draft, output / "agree" / "draft")
    write_record(output / "agree", recipe, seed, asdict(progressed))


def measure(output: Path, seed: int) -> None:
    """Stage ``evaluate``: measure the pair, and the pair before ``agree``."""
    pairs = {
        "evaluation-apart.json": ("target", "distil"),
        "evaluation.json": ("agree/target", "distil-again"),
    }
    for file, (target, draft) in pairs.items():
        found = evaluate(output / target, output / draft, output / "tokenizer", seed=seed)
        write_json(output / file, asdict(found))


def run_stage(stage: str, output: Path, seed: int, num_steps: int | None) -> None:
    """Run one stage into its folder; ``num_steps`` replaces the recipe's number."""

    def with_steps(recipe: Recipe) -> Recipe:
        return recipe if num_steps is None else replace(recipe, num_steps=num_steps)

    def sample(source: str, num_windows: int, stage_seed: int) -> None:
        sample_from_target(output, source, stage, num_steps or num_windows, stage_seed)

    first = ("target", "draft", "sample")
    second = ("agree/target", "agree/draft", "sample-again")
    actions: dict[str, Callable[[], None]] = {
        "tokenizer": lambda: train_vocabulary(output),
        "target": lambda: train_on_text(output, stage, TARGET, with_steps(TARGET_RECIPE), seed),
        "draft": lambda: train_on_text(output, stage, DRAFT, with_steps(DRAFT_RECIPE), seed + 1),
        "sample": lambda: sample(first[0], NUM_SAMPLED_WINDOWS, seed + 2),
        "distil": lambda: distil(output, first, stage, with_steps(DISTIL_RECIPE), seed + 3),
        "agree": lambda: agree(output, with_steps(AGREE_RECIPE), seed + 4),
        "sample-again": lambda: sample(second[0], NUM_SAMPLED_AGAIN_WINDOWS, seed + 5),
        "distil-again": lambda: distil(
            output, second, stage, with_steps(DISTIL_AGAIN_RECIPE), seed + 6
        ),
        "evaluate": lambda: measure(output, seed),
    }
    output.mkdir(parents=True, exist_ok=True)
    actions[stage]()


def main() -> None:
    """Parse the command line and run the stages."""
    parser = argparse.ArgumentParser(prog="python -m tools.distill.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--threads", type=int, default=2, help="changes the result")
    parser.add_argument("--steps", type=int, help="replaces the number of steps of the recipe")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    for stage in STAGES if options.stage == "all" else (options.stage,):
        run_stage(stage, options.output, options.seed, options.steps)


if __name__ == "__main__":
    main()
