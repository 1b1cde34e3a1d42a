"""The bound of the inbox."""

import pytest
from tests.sequences import make_sequence

from ssd.errors import OverloadedError
from ssd_target.decoding.inbox import Inbox


def test_the_error_of_a_full_inbox_names_the_bound_that_was_reached() -> None:
    inbox = Inbox(max_arrivals=3)
    for _ in range(3):
        inbox.submit(make_sequence())
    with pytest.raises(OverloadedError, match=r"3 requests .*\(max_queue \+ max_num_seqs\)"):
        inbox.submit(make_sequence())
