"""Assemble the folders that the package carries: ``python -m ssd.demo.package STAGES WEIGHTS``.

A folder holds a model in Hugging Face's layout, its tokenizer and a model card with the figures of
the very run that made it.
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

from ssd.demo import NAMES
from ssd.errors import SetupError

logger = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_PAIR_BYTES = 40_000_000
"""Both folders together: they live in the repository and in every image."""

CARD = Template("""\
---
license: mit
library_name: ssd
tags: [code, python, speculative-decoding]
---
# The embedded $name

A Llama of $parameters parameters ($layers layers, width $width, bf16) with a byte-level BPE of
$vocabulary entries. It completes Python in the manner of the standard library and knows nothing
else: it is there so that the package can be tried, tested and measured anywhere without a
download. $role

| | |
|---|---|
| Data | the `*.py` files of the standard library of Python $python, without tests, tables |
| Licence of the data | PSF-2.0 |
| Size of the data | $corpus_tokens tokens; about one module in twenty is held out |
| Licence of the weights | MIT |
$training
| Bytes a token, held-out text | $bytes_a_token |
| Loss on held-out modules, nats a token | target $target_loss, draft $draft_loss |
| KL(target, draft) on held-out modules | $kl |
| Greedy agreement on held-out modules | $agreement |
| Tokens a round, K = $lookahead, greedy | $round_0 |
| Tokens a round, K = $lookahead, T = 0.6, coupled | $round_06 |
| Tokens a round, K = $lookahead, T = 1, coupled | $round_1 |

Tokens a round (accepted length plus one) are means over continuations of $new_tokens tokens that
the target writes after $num_prompts prompts of $prompt_tokens tokens from held-out modules.

Make it again with `python -m ssd.demo.train --output DIR`, then `python -m ssd.demo.package DIR
WEIGHTS`; judge it with `python -m ssd.demo.evaluate TARGET DRAFT`. The result is a function of the
seed, the number of threads, the version of torch, the processor's instructions and the text of
the standard library.
""")

ROLES = {
    "target": "It is the target: it decides every token.",
    "draft": "It is the draft: trained on the text, then distilled from the target, whose law it "
    "learned on the corpus and on text that the target wrote.",
}


def assemble(stages: Path, weights: Path) -> None:
    """Write ``weights/target`` and ``weights/draft`` out of the folders of a training run.

    Args:
        stages: What ``ssd.demo.train`` was given as output; all stages must have run.
        weights: Folder to write into. Each model's folder is replaced by a rename.

    Raises:
        SetupError: A stage is missing, or the pair is larger than ``MAX_PAIR_BYTES``.
    """
    sources = {"target": stages / "target", "draft": stages / "distil"}
    weights.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=weights.parent, prefix=".pair.") as scratch:
        made = Path(scratch)
        for name in NAMES:
            (made / name).mkdir()
            for file in MODEL_FILES:
                _copy(sources[name] / file, made / name / file)
            for file in TOKENIZER_FILES:
                _copy(stages / "tokenizer" / file, made / name / file)
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
    """Return the README of a model: the figures of its run, none written by hand."""
    config = _read(stages / "target" / "config.json")
    if name == "draft":
        config = _read(stages / "distil" / "config.json")
    found = _read(stages / "evaluation.json")
    ran = ("target",) if name == "target" else ("draft", "distil")
    tokenizer_record = _read(stages / "tokenizer" / "record.json")
    rounds = found["tokens_a_round"]
    return CARD.substitute(
        name=name,
        role=ROLES[name],
        parameters=f"{num_parameters(config):,}",
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        vocabulary=f"{config['vocab_size']:,}",
        python=tokenizer_record["python"],
        corpus_tokens=f"{tokenizer_record['num_tokens']:,}",
        training="\n".join(_training_row(stages, stage) for stage in ran),
        bytes_a_token=found["bytes_a_token"],
        target_loss=found["target_loss"],
        draft_loss=found["draft_loss"],
        kl=found["kl"],
        agreement=found["agreement"],
        lookahead=found["lookahead"],
        round_0=rounds["0.0"],
        round_06=rounds["0.6"],
        round_1=rounds["1.0"],
        new_tokens=found["new_tokens"],
        num_prompts=found["num_prompts"],
        prompt_tokens=found["prompt_tokens"],
    )


def corpus_record(num_modules: int, num_tokens: int) -> dict[str, Any]:
    """Return what the card says about the text."""
    return {
        "python": platform.python_version(),
        "num_modules": num_modules,
        "num_tokens": num_tokens,
    }


def _training_row(stages: Path, stage: str) -> str:
    """Return the card's row about one stage."""
    record = _read(stages / stage / "training.json")
    recipe, results = record["recipe"], record["results"]
    kind = {"target": "Training", "draft": "Training on text", "distil": "Distillation"}[stage]
    loss = "KL" if stage == "distil" else "training loss"
    return (
        f"| {kind} | {recipe['num_steps']:,} steps of {recipe['batch_size']} x "
        f"{recipe['length']} tokens ({record['num_tokens']:,} tokens) in "
        f"{results['seconds']:,.0f} s on {record['threads']} threads; Muon and AdamW, peak rates "
        f"{recipe['muon_rate']} and {recipe['adam_rate']}, cosine decay, bf16 autocast; seed "
        f"{record['seed']}, torch {record['torch']}; last {loss} {results['loss']:.3f} |"
    )


def num_parameters(config: dict[str, Any]) -> int:
    """Return the number of parameters of a Llama with tied embeddings."""
    width, size = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * width * heads * size + 3 * width * config["intermediate_size"] + 2 * width
    layers: int = config["num_hidden_layers"]
    return int(config["vocab_size"] * width + layers * layer + width)


def _copy(source: Path, destination: Path) -> None:
    """Copy a file's content; permissions are those of a new file."""
    if not source.is_file():
        raise SetupError(f"{source} is missing; run the stages of ssd.demo.train first")
    shutil.copyfile(source, destination)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file."""
    if not file.is_file():
        raise SetupError(f"{file} is missing; run the stages of ssd.demo.train first")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Parse the command line and assemble."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd.demo.package", description="Assemble the packaged pair."
    )
    parser.add_argument("stages", type=Path, help="output of ssd.demo.train")
    parser.add_argument("weights", type=Path, help="folder to write target/ and draft/ into")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    assemble(options.stages, options.weights)


if __name__ == "__main__":
    main()
