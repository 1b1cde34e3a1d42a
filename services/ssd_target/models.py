"""The models of a target process: its own, and the draft of mode SYNCHRONOUS."""

from dataclasses import dataclass, replace

from ssd.errors import SettingsError
from ssd.model_files.local_model import LocalModel, check_model, find_model
from ssd_target.settings import TargetSettings

DRAFT_CHUNK = 128
"""Tokens of a text that the draft of mode SYNCHRONOUS stores in a step. It is small, and the target
does not store what is in its prefix cache, so the draft would be behind with less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModels:
    """The models that a target loads."""

    target: LocalModel
    draft: LocalModel | None
    """The draft on the target's own device, if ``draft_model`` is set."""


def find_models(settings: TargetSettings) -> TargetModels:
    """Resolve the sources of the models, and read their tokenizers and shapes.

    Raises:
        SetupError: a model does not exist or is not supported, or the two do not match.
    """
    target = find_model(settings, max_num_seqs=settings.max_num_seqs)
    target = replace(target, engine=replace(target.engine, step_tokens=settings.step_tokens))
    if not settings.draft_model:
        return TargetModels(target=target, draft=None)
    draft = find_model(_of_draft(settings), max_num_seqs=settings.max_num_seqs, branches=1)
    if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        raise SettingsError(
            f"draft_model {settings.draft_model} has another tokenizer than {settings.model}; use "
            "a draft of the target's model family"
        )
    if draft.num_token_ids != target.num_token_ids:
        raise SettingsError(
            f"draft_model {settings.draft_model} has {draft.num_token_ids} token ids, but "
            f"{settings.model} has {target.num_token_ids}"
        )
    # The shape of the draft's passes does not matter for the tokens, which the target verifies.
    engine = replace(draft.engine, deterministic=False, prefill_chunk=DRAFT_CHUNK)
    return TargetModels(target=target, draft=replace(draft, engine=engine))


def check_models(settings: TargetSettings) -> None:
    """Check all that can be checked without the weights. Models on the hub are not looked up.

    Raises:
        SetupError: the process would not start.
    """
    check_model(settings, max_num_seqs=settings.max_num_seqs)
    if settings.draft_model:
        check_model(_of_draft(settings), max_num_seqs=settings.max_num_seqs, branches=1)


def _of_draft(settings: TargetSettings) -> TargetSettings:
    # The draft runs in the process of rank 0, between the passes of the target.
    return replace(
        settings,
        model=settings.draft_model,
        weights=settings.draft_weights,
        tensor_parallel_size=1,
    )
