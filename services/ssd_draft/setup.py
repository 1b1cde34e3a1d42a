"""The settings of a draft with its model and its place, as one object for all parts."""

from dataclasses import dataclass

from ssd.model_files.local_model import LocalModel
from ssd.types import Peer
from ssd_draft.settings import DraftSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """Everything that is known before the weights are loaded."""

    settings: DraftSettings
    model: LocalModel
    peer: Peer
    """This process, as its targets see it."""
