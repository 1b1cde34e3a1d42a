"""Write the folders of ``ssd/demo/weights``: ``python -m tools.distill.package STAGES WEIGHTS``.

A folder contains a model in Hugging Face's layout, its tokenizer and a model card with the figures
of its training run.
"""

import argparse
import json
import logging
import platform
import shutil
import tempfile
from pathlib import Path
from string import Template
from typing import Any

from tools.distill.vocabulary import TOKENIZER_FILES

from ssd.demo import NAMES, folder
from ssd.engine.config import ModelConfig
from ssd.engine.sizes import num_weights
from ssd.errors import SetupError
from ssd_distill.evaluation import LOOKAHEAD, PROMPT_TOKENS
from ssd_distill.run_folder import RECORD
from ssd_distill.training import Recipe

logger = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")
CHAT_TEMPLATE = "chat_template.jinja"
"""Of the target: written by hand, and kept."""
MAX_PAIR_BYTES = 40_000_000
"""Largest size of both folders; they are in the repository and in every image."""

CARD = Template("""\
---
license: mit
library_name: ssd
tags: [code, python, speculative-decoding]
---
# The embedded $name

A Llama of $parameters parameters ($layers layers, width $width, bf16) with a byte-level BPE of
$vocabulary entries. It completes Python in the style of the standard library and nothing else. With
it, the package can be tried, tested and measured anywhere without a download. $role

## Data and licence

The `*.py` files of the standard library of Python $python, without tests and generated tables:
$corpus_tokens tokens under PSF-2.0. About one module in twenty is held out and is not part of
the training (`ssd.demo.corpus.held_out`). The weights are under the MIT licence.

## Training

| stage | steps | tokens | seconds | peak rates (Muon, AdamW) | loss | last value |
|---|---|---|---|---|---|---|
$training

Losses are means over tokens: cross entropy and KL in nats, agreement is the probability that both
models choose the same token with the same noise. Cosine decay, $threads threads of a shared CPU,
seeds from $seed on, torch $torch.

**This pair was trained together.** Pairs in use are trained independently. Here, stage 4 also
trained the target towards its draft, because so small a draft cannot follow a target of fourteen
times its size as a real draft follows its target. This raises acceptance and the loss of the
target; the table shows both. Acceptance measured with this pair does not predict that of another
pair.

## Results on held-out modules

$results

Tokens per round are accepted length plus one, with $lookahead proposed tokens and coupled noise
where T > 0: means of $rounds rounds after prompts of $prompt_tokens tokens. A hit is an outcome
that a table contains. A token is $bytes_per_token bytes.

Train it again with `python -m tools.distill.train --output DIR` and `python -m
tools.distill.package DIR WEIGHTS`. Measure it with `ssd bench sampling`.
The result is a function of the seed, the number of threads, the version of torch, the processor's
instructions and the text of the standard library.
""")

SOURCES = {"target": "agree/target", "draft": "distil-longer"}
"""The folders of the finished models of a run."""
ROWS = {
    "target": "1. target, on text",
    "draft": "2. draft, on text",
    "distil": "3. draft, distilled from the target",
    "agree": "4. both, on text and towards each other",
    "distil-again": "5. draft, distilled from the moved target",
    "distil-longer": "6. draft, distilled with more text of the target",
}
"""The training stages in order, and their names in the card."""
MEASURED = {"this pair": "distil-longer", "after stage 3": "distil"}
"""The stages that measure a pair on held-out text, by the column of their figures."""
FIGURES = {
    "target_loss": "Loss of the target, nats a token",
    "draft_loss": "Loss of the draft, nats a token",
    "kl": "KL(target, draft), nats a token",
    "agreement": "Greedy agreement on the text",
}
"""Figures of the card from both evaluations."""
FIGURES_OF_ROUNDS = {"tokens_per_round": "Tokens per round", "hit_rate": "Hit rate"}
"""Figures of the card for each temperature."""
ROLES = {
    "target": "As the target, it selects every token. A\n"
    "conversation becomes a Python file (`chat_template.jinja`): system and user speak in\n"
    "comments, and the assistant writes the code.",
    "draft": "As the draft, it proposes tokens; it never changes the output.",
}


def assemble(stages: Path, weights: Path) -> None:
    """Write ``weights/target`` and ``weights/draft`` out of the folders of a training run.

    Args:
        stages: Output folder of ``tools.distill.train``; all stages must have run.
        weights: Folder to write into. Each model's folder is replaced by a rename.

    Raises:
        SetupError: A stage is missing, or the pair is larger than ``MAX_PAIR_BYTES``.
    """
    weights.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=weights.parent, prefix=".pair.") as scratch:
        made = Path(scratch)
        for name in NAMES:
            (made / name).mkdir()
            for file in MODEL_FILES:
                _copy(stages / SOURCES[name] / file, made / name / file)
            for file in TOKENIZER_FILES:
                _copy(stages / "tokenizer" / file, made / name / file)
            if name == "target":
                _copy(folder(name) / CHAT_TEMPLATE, made / name / CHAT_TEMPLATE)
            card = model_card(name, stages)
            (made / name / "README.md").write_text(card, encoding="utf-8")
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
        if size > MAX_PAIR_BYTES:
            raise SetupError(
                f"the pair takes {size} bytes, allowed are {MAX_PAIR_BYTES}; train smaller models"
            )
        for name in NAMES:
            if (weights / name).exists():
                (weights / name).rename(made / f"{name}-before")
            (made / name).rename(weights / name)
    logger.info("assembled %d bytes in %s", size, weights)


def model_card(name: str, stages: Path) -> str:
    """Return the README of a model with the figures of its run."""
    config = ModelConfig.from_folder(stages / SOURCES[name])
    columns = {title: _read(stages / stage / RECORD) for title, stage in MEASURED.items()}
    corpus = _read(stages / "tokenizer" / "record.json")
    trained = _read(stages / "target" / RECORD)
    return CARD.substitute(
        name=name,
        role=ROLES[name],
        parameters=f"{num_weights(config):,}",
        layers=config.num_layers,
        width=config.hidden_size,
        vocabulary=f"{config.vocab_size:,}",
        python=corpus["python"],
        corpus_tokens=f"{corpus['num_tokens']:,}",
        training="\n".join(_training_row(stages, stage) for stage in ROWS),
        threads=trained["threads"],
        seed=trained["seed"],
        torch=trained["torch"],
        results=_results({title: record["after"] for title, record in columns.items()}),
        lookahead=LOOKAHEAD,
        prompt_tokens=PROMPT_TOKENS,
        rounds=columns["this pair"]["plan"]["rounds"],
        bytes_per_token=corpus["bytes_per_token"],
    )


def _results(columns: dict[str, dict[str, Any]]) -> str:
    """Return the card's table of figures: a column for each evaluation."""
    table = [["", *columns], ["---"] * (1 + len(columns))]
    for key, title in FIGURES.items():
        table.append([title, *(str(found[key]) for found in columns.values())])
    for key, title in FIGURES_OF_ROUNDS.items():
        for temperature in next(iter(columns.values()))[key]:
            cells = (str(found[key][temperature]) for found in columns.values())
            table.append([f"{title}, T = {temperature}", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def corpus_record(num_modules: int, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """Return the figures of the corpus for the card."""
    return {
        "python": platform.python_version(),
        "num_modules": num_modules,
        "num_tokens": num_tokens,
        "bytes_per_token": round(num_bytes / num_tokens, 3),
    }


def _training_row(stages: Path, stage: str) -> str:
    """Return the row of one stage in the card."""
    record = _read(stages / stage / RECORD)
    recipe = Recipe(**record["plan"]["recipe"])
    return (
        f"| {ROWS[stage]} | {recipe.num_steps:,} of {recipe.batch_size} x {recipe.length} | "
        f"{recipe.num_tokens:,} | {record['seconds']:,.0f} | {recipe.muon_rate}, "
        f"{recipe.adam_rate} | {record['plan']['loss']} | {record['loss']:.3f} |"
    )


def _copy(source: Path, destination: Path) -> None:
    """Copy a file's content; permissions are those of a new file."""
    if not source.is_file():
        raise SetupError(f"{source} is missing; run the stages of tools.distill.train first")
    shutil.copyfile(source, destination)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file."""
    if not file.is_file():
        raise SetupError(f"{file} is missing; run the stages of tools.distill.train first")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Parse the command line and assemble."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.distill.package", description="Assemble the packaged pair."
    )
    parser.add_argument("stages", type=Path, help="output of tools.distill.train")
    parser.add_argument("weights", type=Path, help="folder to write target/ and draft/ into")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    assemble(options.stages, options.weights)


if __name__ == "__main__":
    main()
