"""Train the embedded pair: ``python -m tools.distill.train --output DIR``.

Each of seven stages reads the folders of earlier stages and writes its own, so each can be repeated
alone:

- ``tokenizer``;
- ``target`` and ``draft``: both models, trained on text;
- ``distil``: the draft, trained to make the choices of the target by ``ssd distill``;
- ``agree``: both models, the target also towards its draft;
- ``distil-again``: as above, with the changed target;
- ``distil-longer``: the same, with more text of the target.

``tools.distill.package`` makes the packaged folders of their results.

With glibc, ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=268435456`` in the
environment keeps freed tensors mapped, which saves a fifth of the time if page faults are slow.
``GOMP_SPINCOUNT=20000`` limits the spinning of threads on shared cores.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tools.distill.losses import agreement_loss, text_loss
from tools.distill.model import DRAFT, TARGET, prepare_folder, untrained
from tools.distill.package import corpus_record
from tools.distill.vocabulary import save_tokenizer, train_tokenizer
from torch import Tensor, nn

from ssd.console import progress
from ssd.demo.corpus import training_modules
from ssd.engine.precision import AUTO, DTYPES, choose_precision
from ssd.text.tokenizer import load_tokenizer
from ssd_bench.sampling.model import Model, load_model
from ssd_cli.display import err
from ssd_distill.corpus import DEMO, read_corpus
from ssd_distill.distillation import Distillation, distill
from ssd_distill.models import Logits, logits_of, write_weights
from ssd_distill.run_folder import RECORD, write_json
from ssd_distill.training import LossFunction, Recipe, Training, mixed_batches, windows
from ssd_distill.written import write_windows

logger = logging.getLogger(__name__)

TARGET_RECIPE = Recipe(
    num_steps=1650, batch_size=8, length=512, adam_rate=3e-3, muon_rate=4e-3, warmup_steps=60
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
AGREE_RECIPE = replace(
    DISTIL_RECIPE, num_steps=300, adam_rate=1e-3, muon_rate=1.5e-3, warmup_steps=15
)
AGREEMENT_WEIGHT = 1.0
"""Weight of a nat of divergence between target and draft, relative to a nat of text."""
DISTIL_AGAIN_RECIPE = replace(DISTIL_RECIPE, num_steps=900, adam_rate=1.5e-3, muon_rate=2e-3)
DISTIL_LONGER_RECIPE = replace(DISTIL_RECIPE, num_steps=600, adam_rate=1e-3, muon_rate=1.2e-3)
NUM_WINDOWS = {"distil": 960, "agree": 960, "distil-again": 480, "distil-longer": 2048}
"""Windows that the target writes for a stage."""
ROUNDS = 600
"""Of the figures of the card, for each temperature."""


def train_vocabulary(output: Path) -> None:
    """Stage ``tokenizer``: write the tokenizer and the figures of the corpus."""
    modules = training_modules()
    save_tokenizer(train_tokenizer(module.text for module in modules), output / "tokenizer")
    num_bytes = sum(len(module.text.encode()) for module in modules)
    record = corpus_record(len(modules), len(read_stream(output)), num_bytes)
    write_json(output / "tokenizer" / "record.json", record)


def read_stream(output: Path) -> Tensor:
    """Return the corpus as token ids, int64 [num_tokens]."""
    tokenizer = load_tokenizer(output / "tokenizer")
    num_ids = tokenizer.vocab_size
    demo = read_corpus((DEMO,), tokenizer, num_token_ids=num_ids, length=1, most_tokens=0, seed=0)
    return demo.train_S


def train_on_text(
    output: Path, name: str, config: dict[str, Any], recipe: Recipe, seed: int
) -> None:
    """Stages ``target`` and ``draft``: train on the corpus from random weights."""
    folder = prepare_folder(output / name, config, output / "tokenizer")
    model = untrained(folder, seed)
    batches = windows(read_stream(output), recipe, torch.Generator().manual_seed(seed))
    record = learn(model, recipe, batches, text_loss(_logits(model)), title=name, loss="text")
    write_weights(model, folder)
    write_json(folder / RECORD, record | {"seed": seed})


def learn(
    model: nn.Module,
    recipe: Recipe,
    batches: Iterator[Tensor],
    loss_of: LossFunction,
    *,
    title: str,
    loss: str,
) -> dict[str, Any]:
    """Train a model in place; return the record of the stage, with the name of its loss."""
    training = Training(model, recipe)
    started = time.perf_counter()
    with progress(err, title, recipe.num_steps) as advance:
        training.run(batches, loss_of, lambda: advance(1, f"loss {training.loss:.3f}"))
    return {
        "plan": {"recipe": asdict(recipe), "loss": loss},
        "seconds": time.perf_counter() - started,
        "loss": training.loss,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _logits(model: Any) -> Logits:
    return logits_of(model, dtype=DTYPES[choose_precision(AUTO, "cpu").dtype])


def distil(output: Path, made: str, pair: tuple[str, str], recipe: Recipe, seed: int) -> None:
    """Stages ``distil``: ``ssd distill`` on the folders of a target and a draft."""
    target, draft = (str(output / each) for each in pair)
    plan = Distillation(
        target=target,
        draft=draft,
        data=(DEMO,),
        recipe=recipe,
        windows=NUM_WINDOWS[made],
        rounds=ROUNDS,
        seed=seed,
    )
    distill(plan, output / made)


def agree(output: Path, recipe: Recipe, seed: int) -> None:
    """Stage ``agree``: train both models of stage ``distil`` towards each other."""
    target, draft = load_model(output / "target"), load_model(output / "distil")
    stream_S = read_stream(output)
    shape = (NUM_WINDOWS["agree"], recipe.length + 1)
    written_BS = write_windows(Model(target.eval()), stream_S, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    batches = mixed_batches(stream_S, written_BS, recipe, generator)
    num_text_rows = recipe.batch_size - recipe.batch_size // 2
    loss_of = agreement_loss(_logits(target), _logits(draft), AGREEMENT_WEIGHT, num_text_rows)
    pair = nn.ModuleList((target.train(), draft.train()))
    record = learn(pair, recipe, batches, loss_of, title="agree", loss="text + KL")
    for name, model, config in (("target", target, TARGET), ("draft", draft, DRAFT)):
        write_weights(model, prepare_folder(output / "agree" / name, config, output / "tokenizer"))
    write_json(output / "agree" / RECORD, record)


def stages(output: Path, seed: int, num_steps: int | None) -> dict[str, Callable[[], None]]:
    """Return the stages in order, by name; ``num_steps`` replaces the recipes' numbers."""

    def steps(recipe: Recipe) -> Recipe:
        return recipe if num_steps is None else replace(recipe, num_steps=num_steps)

    first, second = ("target", "draft"), ("agree/target", "agree/draft")
    third = ("agree/target", "distil-again")
    return {
        "tokenizer": lambda: train_vocabulary(output),
        "target": lambda: train_on_text(output, "target", TARGET, steps(TARGET_RECIPE), seed),
        "draft": lambda: train_on_text(output, "draft", DRAFT, steps(DRAFT_RECIPE), seed + 1),
        "distil": lambda: distil(output, "distil", first, steps(DISTIL_RECIPE), seed + 2),
        "agree": lambda: agree(output, steps(AGREE_RECIPE), seed + 3),
        "distil-again": lambda: distil(
            output, "distil-again", second, steps(DISTIL_AGAIN_RECIPE), seed + 4
        ),
        "distil-longer": lambda: distil(
            output, "distil-longer", third, steps(DISTIL_LONGER_RECIPE), seed + 5
        ),
    }


def main() -> None:
    """Parse the command line and run the stages."""
    names = tuple(stages(Path(), 0, None))
    parser = argparse.ArgumentParser(prog="python -m tools.distill.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", choices=(*names, "all"), default="all")
    parser.add_argument("--threads", type=int, default=2, help="changes the result")
    parser.add_argument("--steps", type=int, help="replaces the number of steps of the recipe")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    actions = stages(options.output, options.seed, options.steps)
    for stage in names if options.stage == "all" else (options.stage,):
        actions[stage]()


if __name__ == "__main__":
    main()
