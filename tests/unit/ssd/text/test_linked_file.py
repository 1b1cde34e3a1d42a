from pathlib import Path

import pytest

from ssd.errors import TokenizerError
from ssd.text.chat_template import load_template

NAMES = {"chat_template.jinja": "secret", "tokenizer_config.json": '{"chat_template": "secret"}'}


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def link(path: Path, to: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)
    return path


@pytest.fixture(params=sorted(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    """The name of a file whose text clients can read."""
    return str(request.param)


def loaded(folder: Path) -> str:
    template = load_template(folder)
    assert template is not None
    return template.text


def test_a_link_out_of_the_model_folder_is_refused(tmp_path: Path, name: str) -> None:
    elsewhere = put(tmp_path / "tokens" / "admins", NAMES[name])
    file = link(tmp_path / "model" / name, elsewhere)
    with pytest.raises(TokenizerError) as refused:
        load_template(tmp_path / "model")
    assert str(refused.value) == (
        f"{file}: is a link to {elsewhere}, which is outside the model folder; replace the link by "
        "the file"
    )


def test_a_link_inside_the_model_folder_is_followed(tmp_path: Path, name: str) -> None:
    put(tmp_path / "..data" / name, NAMES[name])
    link(tmp_path / name, f"..data/{name}")
    assert loaded(tmp_path) == "secret"


def test_a_model_folder_can_be_a_link(tmp_path: Path, name: str) -> None:
    put(tmp_path / "model" / name, NAMES[name])
    link(tmp_path / "current", "model")
    assert loaded(tmp_path / "current") == "secret"


def test_a_snapshot_of_the_hub_links_to_blobs_of_its_model(tmp_path: Path, name: str) -> None:
    model = tmp_path / "models--meta--llama"
    put(model / "blobs" / "0a1b", NAMES[name])
    link(model / "snapshots" / "main" / name, "../../blobs/0a1b")
    assert loaded(model / "snapshots" / "main") == "secret"


def test_a_snapshot_does_not_link_to_blobs_of_another_model(tmp_path: Path, name: str) -> None:
    put(tmp_path / "models--other" / "blobs" / "0a1b", NAMES[name])
    snapshot = tmp_path / "models--mine" / "snapshots" / "main"
    link(snapshot / name, "../../../models--other/blobs/0a1b")
    with pytest.raises(TokenizerError, match="outside the model folder"):
        load_template(snapshot)


def test_the_blobs_of_a_snapshot_are_no_link(tmp_path: Path, name: str) -> None:
    put(tmp_path / "tokens" / "admins", NAMES[name])
    model = tmp_path / "models--mine"
    link(model / "blobs", tmp_path / "tokens")
    link(model / "snapshots" / "main" / name, "../../blobs/admins")
    with pytest.raises(TokenizerError, match="outside the model folder"):
        load_template(model / "snapshots" / "main")
