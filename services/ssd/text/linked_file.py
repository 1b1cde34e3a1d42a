"""Links of a model folder to files elsewhere."""

from pathlib import Path

from ssd.errors import TokenizerError


def check_link(folder: Path, file: Path) -> None:
    """Refuse a file of a model folder that is a link to a file outside the folder.

    A template is text that clients can read, so a model of another author could show them a secret
    of the process. The cache of the hub is accepted, where the files of a snapshot are links to the
    blobs of the same model. Other files of a model may be links to any place: clients cannot read
    them.

    Raises:
        TokenizerError: names the file, and where its link leads.
    """
    home, resolved = folder.resolve(), file.resolve()
    allowed = [home]
    model = home.parent.parent
    if home.parent.name == "snapshots" and model.name.startswith("models--"):
        allowed.append(model / "blobs")
    if not any(map(resolved.is_relative_to, allowed)):
        raise TokenizerError(
            f"{file}: is a link to {resolved}, which is outside the model folder; replace the link "
            "by the file"
        )
