"""Sessions whose texts begin alike store the beginning once."""

from tests.unit.ssd_draft.ledger_draft import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    VOCAB,
    Draft,
    FakeLink,
    K,
    a_text,
    hits,
)

from ssd.engine.batch import PagedBatch
from ssd.types import CloseSession, RefusalReason
from ssd_draft.inbox import Event


def chunks(draft: Draft) -> list[int]:
    """Record the first position of each chunk that is stored from now on."""
    firsts: list[int] = []
    prefill = draft.runner.prefill

    def recorded(batch: PagedBatch) -> int | None:
        firsts.append(int(batch.first_positions_B[0]))
        return prefill(batch)

    draft.runner.prefill = recorded  # type: ignore[method-assign]
    return firsts


def test_sessions_that_open_together_store_the_same_prompt_once() -> None:
    draft, link = Draft(), FakeLink()
    prompt = list(range(3 * CHUNK + 1))
    texts = {number: a_text(prompt.copy(), seed=number) for number in (1, 2)}
    texts[3] = a_text([*prompt[:CHUNK], 60, *prompt])
    firsts = chunks(draft)
    for number, text in texts.items():
        draft.open(link, text, number)
    draft.settle()
    # The chunks of the first session, and of the third one after the common beginning.
    assert sorted(firsts) == [0, CHUNK, CHUNK, 2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]
    for _ in range(4):
        draft.apply(link, *hits(link, texts))
        for number, text in texts.items():
            text.check(link.newest(number))


def test_a_session_continues_with_what_one_that_has_ended_stored() -> None:
    draft, link, text = Draft(), FakeLink(), a_text(list(range(CHUNK + 2)))
    draft.open(link, text)
    draft.settle()
    for _ in range(5):
        draft.apply(link, text.hit(link.newest(), len(text.proposal), K))
    draft.inbox.put(Event(link, CloseSession(1)))
    draft.settle()
    firsts, text.proposal = chunks(draft), ()
    draft.open(link, text, 2)
    draft.settle()
    num_shared = (len(text.committed) - 1) // BLOCK * BLOCK
    assert firsts == [num_shared]
    assert num_shared > CHUNK
    text.check(link.newest(2))
    draft.apply(link, *hits(link, {2: text}))
    text.check(link.newest(2))


def test_a_session_that_ends_in_its_prefill_leaves_what_it_stored() -> None:
    draft, link, text = Draft(), FakeLink(), a_text(list(range(3 * CHUNK)))
    draft.open(link, text)
    draft.worker.run_step()
    draft.inbox.put(Event(link, CloseSession(1)))
    draft.settle()
    firsts = chunks(draft)
    draft.open(link, text, 2)
    draft.settle()
    assert firsts == [CHUNK, 2 * CHUNK]
    text.check(link.newest(2))


def test_nothing_of_a_session_that_is_not_finite_is_shared() -> None:
    draft, link, text = Draft(), FakeLink(), a_text(list(range(CHUNK)))
    draft.open(link, text)
    draft.settle()
    for _ in range(3):
        draft.apply(link, text.hit(link.newest(), len(text.proposal), K))
    bad = next(token for token in range(VOCAB) if token not in link.newest().bonus_N)
    draft.runner.nan_token = bad
    draft.apply(link, text.commit(0, bad))
    assert link.refused == [(1, RefusalReason.NOT_FINITE)]
    assert draft.pool.num_cached == (CHUNK - 1) // BLOCK, "the prompt was finite"


def test_a_text_that_is_shared_is_not_dropped_for_the_blocks_of_its_next_session() -> None:
    """The blocks of the first session are all that there are."""
    draft, link, text = Draft(num_blocks=1 + MAX_LEN // BLOCK), FakeLink(), a_text([7] * 2 * CHUNK)
    firsts = chunks(draft)
    for number in (1, 2):
        firsts.clear()
        draft.open(link, text, number, max_len=MAX_LEN)
        draft.settle()
        text.check(link.newest(number))
        draft.inbox.put(Event(link, CloseSession(number)))
        draft.settle()
    num_shared = (2 * CHUNK - 1) // BLOCK * BLOCK
    assert firsts == [num_shared]
