"""In which order sequences get sessions."""

from unittest.mock import Mock

import pytest
from tests.unit.ssd.pool import links

from ssd.pool import pool
from ssd.pool.link import RETRY_SECONDS
from ssd.pool.pool import MAX_OPENED_TOKENS, DraftPool
from ssd.pool.rounds import RoundResult
from ssd.pool.settings import DraftsSettings
from ssd.speculation.backup import WINDOW_TOKENS
from ssd.testing.clock import FakeClock
from ssd.types import OpenSession, Outcome, SessionRefused, TargetMessage


def make_pool(clock: FakeClock) -> DraftPool:
    return DraftPool(DraftsSettings(branches=2), links.LOOKAHEAD, 10, clock)


class FullDraft:
    """Refuses texts that may be longer than ``room``, and opens all others."""

    def __init__(self, room: int) -> None:
        self.clock = FakeClock(100.0)
        self.pool = make_pool(self.clock)
        self.link = links.link()
        self.link.send = self._receive
        self.pool.attach(self.link)
        self.room = room
        self.requested: list[int] = []
        """Maximum length of the sequence of each opening."""

    def begin(self, *lengths: int, num_tokens: int = 1) -> None:
        """Add sequences, whose ids are their maximum lengths."""
        for length in lengths:
            opening = OpenSession(
                token_ids=(1,) * num_tokens, max_len=length, seed=0, temperature=0.0
            )
            self.pool.begin(length, opening)

    def run(self, *lengths: int, num_rounds: int) -> list[int]:
        """Run rounds of these sequences, each as long as a link pauses; return the openings."""
        self.requested.clear()
        for _ in range(num_rounds):
            self.pool.open_sessions(lengths)
            self.clock.advance(RETRY_SECONDS)
        return self.requested.copy()

    def _receive(self, message: TargetMessage | bytes) -> None:
        if not isinstance(message, OpenSession):
            return
        length = self.link.sessions[message.session].sequence.opening.max_len
        self.requested.append(length)
        if length > self.room:
            self.pool.refuse(self.link, SessionRefused(message.session, "max_sessions"))
        else:
            self.link.sessions[message.session].is_open = True


def test_a_text_without_room_does_not_prevent_the_sessions_of_others() -> None:
    draft = FullDraft(room=50)
    draft.begin(90, 20, 30, 40)
    assert draft.run(90, 20, 30, 40, num_rounds=2) == [90, 20, 30, 40, 90]
    assert [each.sequence.opening.max_len for each in draft.link.sessions.values()] == [20, 30, 40]


def test_texts_without_room_are_tried_in_turn() -> None:
    draft = FullDraft(room=50)
    draft.begin(90, 80, 70)
    assert draft.run(90, 80, 70, num_rounds=5) == [90, 80, 70, 90, 80]


def test_short_texts_open_while_a_long_one_without_room_pauses_the_link() -> None:
    draft = FullDraft(room=50)
    draft.begin(200, 120, 110, 40, 30)
    draft.pool.open_sessions([200, 120, 110, 40, 30])
    # No text of more than half of a refused one is tried, so a full draft receives few openings.
    assert draft.requested == [200, 40, 30]


def test_a_refused_text_gets_a_session_as_soon_as_there_is_room() -> None:
    draft = FullDraft(room=50)
    draft.begin(90)
    draft.run(90, num_rounds=2)
    draft.room = 90
    assert draft.run(90, num_rounds=2) == [90]
    assert len(draft.link.sessions) == 1


def test_sequences_that_were_not_refused_open_in_their_order() -> None:
    draft = FullDraft(room=50)
    draft.begin(30, 10, 20)
    assert draft.run(30, 10, 20, num_rounds=2) == [30, 10, 20]


def test_a_session_that_opens_again_gets_all_tokens() -> None:
    prompt = tuple(range(3 * WINDOW_TOKENS))
    drafts = make_pool(FakeClock())
    drafts.begin(1, OpenSession(token_ids=prompt, max_len=2**20, seed=0, temperature=0.0))
    sent: list[TargetMessage | bytes] = []
    text = prompt
    for tokens in ((), (7, 8), (9,)):
        result = RoundResult(
            1, tokens, 0, Outcome(0, 7), is_finished=False, max_proposed=links.LOOKAHEAD
        )
        drafts.round([result], 0.0, lambda: None)
        text += tokens
        link = links.link()
        link.send = sent.append
        drafts.attach(link)
        drafts.open_sessions([1])
        drafts.detach(link, "lost")
        opening = sent[-1]
        assert isinstance(opening, OpenSession)
        assert opening.token_ids == text


HALF = MAX_OPENED_TOKENS // 2
LONG = tuple(range(10 * MAX_OPENED_TOKENS, 10 * MAX_OPENED_TOKENS + 7))
"""Maximum lengths of long texts."""


def test_long_texts_open_in_their_order_over_several_rounds() -> None:
    draft = FullDraft(room=LONG[-1])
    draft.begin(*LONG, num_tokens=HALF)
    opened = [draft.run(*LONG, num_rounds=1) for _ in range(5)]
    assert opened == [[*LONG[:2]], [*LONG[2:4]], [*LONG[4:6]], [*LONG[6:]], []]


def test_a_text_that_is_longer_than_a_round_opens_still_opens() -> None:
    draft = FullDraft(room=LONG[-1])
    draft.begin(*LONG[:2], num_tokens=MAX_OPENED_TOKENS + 1)
    opened = [draft.run(*LONG[:2], num_rounds=1) for _ in range(3)]
    assert opened == [[LONG[0]], [LONG[1]], []]


def test_short_texts_open_in_one_round() -> None:
    draft = FullDraft(room=LONG[-1])
    draft.begin(*LONG, num_tokens=10)
    assert draft.run(*LONG, num_rounds=1) == [*LONG]


def test_long_texts_without_room_do_not_delay_others_for_ever() -> None:
    draft = FullDraft(room=LONG[3])
    draft.begin(*reversed(LONG), num_tokens=HALF)
    draft.run(*reversed(LONG), num_rounds=20)
    opened = sorted(each.sequence.opening.max_len for each in draft.link.sessions.values())
    assert opened == [*LONG[:4]]


def test_a_text_that_a_draft_cannot_serve_does_not_prevent_the_next_one() -> None:
    draft = FullDraft(room=50)
    draft.begin(20, 30)
    draft.pool.open_sessions([20])
    draft.pool.refuse(draft.link, SessionRefused(next(iter(draft.link.sessions)), "not_finite"))
    assert draft.run(20, 30, num_rounds=1) == [30]


@pytest.mark.parametrize("is_paused", [False, True])
def test_drafts_that_are_full_or_refuse_are_asked_for_one_text_a_round(
    monkeypatch: pytest.MonkeyPatch, *, is_paused: bool
) -> None:
    draft = FullDraft(room=0 if is_paused else 2000)
    texts = range(1000, 1100)
    draft.begin(*texts)
    draft.pool.open_sessions(texts)
    assert len(draft.requested) == (1 if is_paused else draft.link.max_sessions)
    tries = Mock(return_value=None)
    monkeypatch.setattr(pool, "choose_link", tries)
    draft.pool.open_sessions(texts)
    tries.assert_called_once()
