"""A draft with one open session."""

import pytest
from tests.unit.ssd_draft.ledger_draft import Draft, FakeLink, Opened, a_text


@pytest.fixture(params=[0.0, 0.7, 1.0])
def opened(request: pytest.FixtureRequest) -> Opened:
    draft, link = Draft(), FakeLink()
    text = a_text([5, 9, 2, 7, 1, 1, 3, 8, 4, 30, 11], temperature=request.param)
    draft.open(link, text)
    draft.settle()
    return draft, link, text
