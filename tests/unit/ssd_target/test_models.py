"""The models of a target: its own, and that of mode SYNCHRONOUS."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssd.errors import MemoryBudgetError, ModelNotFoundError, SettingsError
from ssd.testing.tiny_folder import VOCAB_SIZE, write_byte_tokenizer, write_tiny_folder
from ssd_target.models import check_models, find_models
from ssd_target.settings import TargetSettings


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "target")


def of(target: Path, draft: str) -> TargetSettings:
    return TargetSettings(model=str(target), draft_model=draft, deterministic=True)


def test_without_a_draft_model_only_the_target_is_found(target: Path) -> None:
    assert find_models(of(target, "")).draft is None


def test_the_engine_proves_prompts_as_long_as_a_step(target: Path) -> None:
    settings = TargetSettings(model=str(target), step_tokens=64)
    assert find_models(settings).target.engine.step_tokens == 64


def test_a_draft_on_the_targets_device_builds_tables_of_one_branch(
    target: Path, tmp_path: Path
) -> None:
    draft = find_models(of(target, str(write_tiny_folder(tmp_path / "draft", seed=1)))).draft
    assert draft is not None
    assert (draft.engine.branches, draft.engine.lookahead) == (1, TargetSettings().lookahead)


def test_a_draft_with_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    strange = write_tiny_folder(tmp_path / "strange")
    write_byte_tokenizer(strange, end="<|another|>")
    with pytest.raises(SettingsError, match="has another tokenizer"):
        find_models(of(target, str(strange)))


def test_a_draft_with_a_smaller_embedding_is_refused(target: Path, tmp_path: Path) -> None:
    small = write_tiny_folder(tmp_path / "small", vocab_size=200)
    with pytest.raises(SettingsError, match=r"has 200 token ids, but .* has 257"):
        find_models(of(target, str(small)))


@pytest.mark.parametrize("rows", [(VOCAB_SIZE + 63, VOCAB_SIZE), (VOCAB_SIZE, VOCAB_SIZE + 63)])
def test_the_embeddings_of_a_pair_may_have_different_padding(
    tmp_path: Path, rows: tuple[int, int]
) -> None:
    target, draft = (write_tiny_folder(tmp_path / str(size), vocab_size=size) for size in rows)
    models = find_models(of(target, str(draft)))
    assert models.draft is not None
    assert models.draft.num_token_ids == models.target.num_token_ids == VOCAB_SIZE


def test_a_missing_draft_is_found_without_the_weights(target: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-folder"):
        check_models(of(target, "/no-such-folder"))


def test_the_branches_of_a_draft_are_in_the_check_of_its_memory(
    target: Path, tmp_path: Path
) -> None:
    draft = str(write_tiny_folder(tmp_path / "draft", seed=1))
    enough = TargetSettings(
        model=str(target), engine="torch", max_model_len=64, kv_cache_bytes=5 * 16 * 256
    )
    check_models(enough)
    with pytest.raises(MemoryBudgetError, match="the KV cache can use"):
        check_models(replace(enough, draft_model=draft))


def test_ranks_that_do_not_divide_the_model_are_refused_before_they_start(target: Path) -> None:
    settings = TargetSettings(model=str(target), tensor_parallel_size=8)
    with pytest.raises(SettingsError, match="does not divide the 4 attention heads"):
        find_models(settings)


def test_a_widened_model_is_checked_with_its_own_heads() -> None:
    check_models(TargetSettings(model="demo://target?widen=4", tensor_parallel_size=8))
