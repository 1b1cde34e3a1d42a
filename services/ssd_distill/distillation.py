"""A run: from two models and text to the folder of a trained draft, with checkpoints.

The folder is a complete model from the first checkpoint on. Beside the model, ``distill.json`` has
what the run was asked for and has found, and ``training/`` what is needed to go on with it. A run
goes on with the same weights as if it had not been interrupted.
"""

import hashlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ssd.console import progress
from ssd.demo.widen import copy_companions
from ssd.engine.config import ModelConfig, read_config
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.engine.models.weights import open_checkpoint
from ssd.engine.precision import AUTO, DTYPES, choose_precision
from ssd.engine.runner import require_device
from ssd.engine.sizes import num_weights
from ssd.errors import SettingsError
from ssd.model_files.local_model import LocalModel
from ssd_bench.sampling.model import Model, load_model
from ssd_cli.display import err, report, status
from ssd_distill.corpus import Corpus, read_corpus
from ssd_distill.evaluation import MOST_TOKENS, PROMPT_TOKENS, TEMPERATURES, HeldOut
from ssd_distill.losses import LOSS, teacher_loss
from ssd_distill.models import (
    load_tensors,
    logits_of,
    new_config,
    new_model,
    replace_tensors,
    stored_dtype,
    write_weights,
)
from ssd_distill.run_folder import (
    RECORD,
    WORK,
    held_folder,
    is_complete,
    read_record,
    replace_file,
    write_json,
)
from ssd_distill.training import LossFunction, Recipe, Training, is_finite, mixed_batches
from ssd_distill.written import write_windows
from ssd_target.models import TargetModels, find_models
from ssd_target.settings import TargetSettings

STATE = f"{WORK}/state.safetensors"
WRITTEN = f"{WORK}/written.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """What a run is asked for. With the same values, an interrupted run goes on."""

    target: str
    draft: str = ""
    """Model that is trained further; empty: a new one."""
    num_layers: int = 0
    """Layers of a new draft."""
    width: int = 0
    """Width of a new draft."""
    data: tuple[str, ...]
    recipe: Recipe
    windows: int
    """Windows of text that the target writes for half of each batch."""
    rounds: int
    """Rounds of the figures on held-out text, for each temperature."""
    seed: int
    loss: str = LOSS
    """A run that was interrupted does not go on with another one."""


def distill(
    plan: Distillation, output: Path, *, device: str = "cpu", checkpoint_seconds: float = 300.0
) -> dict[str, Any]:
    """Run a plan, or go on with it; return its record.

    Args:
        plan: what to do.
        output: folder of the trained draft.
        device: of both models.
        checkpoint_seconds: time between checkpoints.

    Returns:
        The content of ``RECORD``: the plan, hashes of text and models, the loss, the seconds, and
        the figures ``before`` and ``after``, each an ``Evaluation``.

    Raises:
        SetupError: a target would refuse a model, the two do not match, there is no text, or the
            folder cannot be written, or another process uses it, or it contains something else, or
            a run with other text or models, or one that began on another device or with another
            number of threads.
        KeyboardInterrupt: after Ctrl-C. The last checkpoint is the step that it interrupted.
    """
    require_device(device)
    pair = _checked_pair(plan)
    with held_folder(output):
        return _distill(plan, output, pair, device, checkpoint_seconds)


def _distill(
    plan: Distillation, output: Path, pair: TargetModels, device: str, checkpoint_seconds: float
) -> dict[str, Any]:
    config = _config(plan, pair)
    record = _existing_record(plan, output)
    if record is not None and not is_complete(record):
        _check_place(record, device, output)
    # Before the record is written, so that a wrong name is not a run.
    with status("reading text"):
        corpus = read_corpus(
            plan.data,
            pair.target.tokenizer,
            num_token_ids=min(each.num_token_ids for each in (pair.target, pair.draft) if each),
            length=max(PROMPT_TOKENS, plan.recipe.length),
            most_tokens=plan.recipe.num_tokens,
            seed=plan.seed,
        )
    inputs = _inputs(pair, corpus)
    if record is not None:
        _check_inputs(record, inputs, output)
        if is_complete(record):
            return record
    # Before the record, too: a model that cannot be made or loaded is no run.
    models = _load(plan, pair, config, device)
    if record is None:
        record = {"plan": _as_json(plan), "inputs": inputs, "seconds": 0.0, **_place(device)}
    if "before" not in record:
        _begin(output, (pair.draft or pair.target).folder, config, record)
    _Run(plan, output, record, pair.target, models).run(corpus, checkpoint_seconds)
    return record


def _checked_pair(plan: Distillation) -> TargetModels:
    """Return the models; refuse what a target would refuse, and sequences that are too long."""
    pair = find_models(TargetSettings(model=plan.target, draft_model=plan.draft, engine="torch"))
    needed = max(MOST_TOKENS, plan.recipe.length)
    for model in filter(None, (pair.target, pair.draft)):
        config = ModelConfig.from_folder(model.folder)
        open_checkpoint(model.folder, config)
        longest = config.max_position_embeddings
        if longest < needed:
            raise SettingsError(
                f"{model.folder} has {longest} positions, and --length {plan.recipe.length} with "
                f"the figures needs {needed}: use another model, or a smaller --length"
            )
    return pair


def _config(plan: Distillation, pair: TargetModels) -> dict[str, Any]:
    """Return the ``config.json`` of the trained draft, with the data type of its weights."""
    if pair.draft is None:
        return new_config(pair.target.folder, plan.num_layers, plan.width)
    config = read_config(pair.draft.folder)
    if not (config.get("dtype") or config.get("torch_dtype")):
        config["torch_dtype"] = stored_dtype(pair.draft.folder)
    return config


def _existing_record(plan: Distillation, output: Path) -> dict[str, Any] | None:
    """Return the record of a folder that this plan began, None if there is nothing yet."""
    if (record := read_record(output)) is None:
        return None
    wanted = _as_json(plan)
    if is_complete(record):
        del wanted["loss"]  # A complete run has nothing left to train.
    for name, value in wanted.items():
        if (earlier := record["plan"].get(name)) != value:
            raise SettingsError(
                f"--output {output} is of a run with another {name} ({earlier}, not {value}): "
                "use another folder"
            )
    return record


def _inputs(pair: TargetModels, corpus: Corpus) -> dict[str, str]:
    """Return fingerprints of what the flags of a run name: the text as tokens, and the models."""
    tokens = hashlib.sha256()
    for part_S in (corpus.train_S, corpus.held_out_S):
        tokens.update(f"{len(part_S)}\0".encode())
        tokens.update(part_S.numpy().tobytes())
    models = {"target": pair.target, "draft": pair.draft}
    return {"data": f"sha256:{tokens.hexdigest()}"} | {
        name: weights_fingerprint(model.folder) for name, model in models.items() if model
    }


def _check_inputs(record: dict[str, Any], inputs: dict[str, str], output: Path) -> None:
    """Refuse a run whose text or models had other contents under the same names."""
    earlier = record.get("inputs") or {}
    changed = [f"--{name}" for name, value in inputs.items() if earlier.get(name) != value]
    if changed:
        raise SettingsError(
            f"--output {output} is of a run with other contents of {', '.join(changed)}: "
            "use another folder"
        )


def _check_place(record: dict[str, Any], device: str, output: Path) -> None:
    """Refuse to go on where the sums of a step would have another order."""
    for name, value in _place(device).items():
        if (earlier := record[name]) != value:
            raise SettingsError(
                f"--output {output} is of a run with {name} {earlier}, not {value}: use the same "
                "(--device, OMP_NUM_THREADS), or another folder"
            )


def _place(device: str) -> dict[str, Any]:
    """What the order of the sums of a step depends on, besides the machine."""
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _begin(output: Path, source: Path, config: dict[str, Any], record: dict[str, Any]) -> None:
    """Write all but the weights; the tokenizer is that of ``source``.

    The record is the first file, so the folder is that of a run even if the process is killed
    between two files. Until the run has figures, each start writes all of them.
    """
    with tempfile.TemporaryDirectory(dir=output / WORK) as scratch:
        folder = Path(scratch)
        copy_companions(source, folder)
        write_json(folder / "config.json", config)
        write_json(folder / RECORD, record)
        for file in sorted(folder.iterdir(), key=lambda file: file.name != RECORD):
            replace_file(file, output / file.name)


def _as_json(plan: Distillation) -> dict[str, Any]:
    """Return the plan as a file of JSON has it: tuples are lists."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return document


@dataclass(frozen=True, slots=True)
class _Models:
    """The models of a run, of transformers."""

    target: Any
    draft: Any
    dtype: torch.dtype
    """Data type of the target, and of the arithmetic of losses."""
    device: str


def _load(plan: Distillation, pair: TargetModels, config: dict[str, Any], device: str) -> _Models:
    """Load the models, or make the new draft of a ``config.json``."""
    weights = num_weights(ModelConfig.from_folder(pair.target.folder))
    dtype = DTYPES[choose_precision(AUTO, device, weights).dtype]
    with status("loading models"):
        target = load_model(pair.target.folder, dtype, device).eval()
        if pair.draft is not None:
            draft = load_model(pair.draft.folder, device=device)
            # A draft can be served with rows of the embedding that are not, but not trained.
            if not is_finite(draft):
                raise SettingsError(f"{pair.draft.folder} has weights that are not finite")
        else:
            draft = new_model(config, torch.Generator().manual_seed(plan.seed)).to(device)
    return _Models(target, draft, dtype, device)


@dataclass(frozen=True, slots=True)
class _Run:
    """One process of a run."""

    plan: Distillation
    output: Path
    record: dict[str, Any]
    local: LocalModel
    """The target."""
    models: _Models

    def run(self, corpus: Corpus, checkpoint_seconds: float) -> None:
        """Measure, let the target write, train, and measure again; complete the record."""
        plan, local = self.plan, self.local
        target, draft, dtype = self.models.target, self.models.draft, self.models.dtype
        held_out = HeldOut(
            stream_S=corpus.held_out_S,
            length=plan.recipe.length,
            rounds=plan.rounds,
            prefix=tuple(local.tokenizer.encode("")),
            num_token_ids=local.num_token_ids,
            dtype=dtype,
        )
        self._measure("before", held_out, target, draft)
        written_BS = self._written(target, corpus.train_S, held_out)
        student, teacher = (
            logits_of(model, local.num_token_ids, dtype) for model in (draft, target)
        )
        generator = torch.Generator().manual_seed(plan.seed)
        batches = mixed_batches(corpus.train_S, written_BS, plan.recipe, generator)
        self._train(draft, batches, teacher_loss(student, teacher), checkpoint_seconds)
        # The weights that were written, in the data type of the draft.
        trained = load_model(self.output, device=self.models.device)
        self._measure("after", held_out, target, trained)
        # The run is complete: what cannot be removed does no harm.
        shutil.rmtree(self.output / WORK, ignore_errors=True)

    def _measure(self, name: str, held_out: HeldOut, target: Any, draft: Any) -> None:
        """Add figures to the record, unless it has them."""
        if name in self.record:
            return
        with progress(err, f"figures {name}", len(TEMPERATURES) * held_out.rounds) as advance:
            evaluation = held_out.evaluate(target, draft.eval(), lambda: advance(1))
        self.record[name] = asdict(evaluation)
        write_json(self.output / RECORD, self.record)

    def _written(self, target: Any, stream_S: Tensor, held_out: HeldOut) -> Tensor:
        """Return the windows that the target writes, or wrote before an interruption."""
        plan, file = self.plan, self.output / WRITTEN
        if file.is_file():
            return load_tensors(file)["written_BS"]
        with progress(err, "text of the target", plan.windows) as advance:
            written_BS = write_windows(
                Model(target, held_out.num_token_ids),
                stream_S,
                (plan.windows, plan.recipe.length + 1),
                plan.seed,
                prefix=held_out.prefix,
                on_windows=advance,
            )
        replace_tensors({"written_BS": written_BS}, file)
        return written_BS

    def _train(
        self, draft: Any, batches: Iterator[Tensor], loss_of: LossFunction, period: float
    ) -> None:
        """Take the steps that are left, with a checkpoint after each ``period`` seconds."""
        training, file = Training(draft.train(), self.plan.recipe), self.output / STATE
        if file.is_file():
            training.restore(load_tensors(file, self.models.device))
            # The model of the checkpoint can be damaged or removed.
            write_weights(draft, self.output)
        num_steps, earlier = self.plan.recipe.num_steps, self.record["seconds"]
        begun = saved = time.monotonic()

        def on_step() -> None:
            nonlocal saved
            advance(1, f"loss {training.loss:.3f}")
            now = time.monotonic()
            is_last = is_interrupted.is_set() or training.num_done == num_steps
            if is_last or now - saved >= period:
                write_weights(draft, self.output)
                replace_tensors(training.state(), file)
                self.record.update(loss=training.loss, seconds=earlier + now - begun)
                write_json(self.output / RECORD, self.record)
                saved = now
            if is_interrupted.is_set():
                report("stopped", f"{self.output} has step {training.num_done} of {num_steps}")
                raise KeyboardInterrupt

        with (
            held_interrupt() as is_interrupted,
            progress(err, "training", num_steps, done=training.num_done) as advance,
        ):
            training.run(batches, loss_of, on_step)


@contextmanager
def held_interrupt() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; the second one interrupts as usual."""
    is_set = Event()
    usual = signal.getsignal(signal.SIGINT)

    def hold(_number: int, _frame: FrameType | None) -> None:
        is_set.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, hold)
    try:
        yield is_set
    finally:
        signal.signal(signal.SIGINT, usual)
