"""A draft's set-up without a model, which fits the ``HELLO`` of ``tests.handshake``."""

from pathlib import Path

from ssd.engine.config import EngineConfig
from ssd.model_files.local_model import LocalModel
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import Peer
from ssd_draft.settings import DraftSettings
from ssd_draft.setup import DraftSetup


def make_setup(max_len: int = 20) -> DraftSetup:
    return DraftSetup(
        settings=DraftSettings(port=0, http_port=0, max_sessions=4),
        model=LocalModel(
            folder=Path("nowhere"),
            tokenizer=ByteTokenizer(),
            engine=EngineConfig(max_model_len=max_len, num_token_ids=10, branches=24),
        ),
        peer=Peer(),
    )


SETUP = make_setup()
