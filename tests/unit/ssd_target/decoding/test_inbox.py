"""The bound of the inbox."""

import pytest

from ssd.errors import OverloadedError
from ssd.testing.sink import ListSink
from ssd.types import Request, SamplingParams
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.sequence import Arrival


def test_the_error_of_a_full_inbox_names_the_bound_that_was_reached() -> None:
    inbox = Inbox(max_arrivals=3)
    request = Request(request_id="1", prompt_ids=(5,), sampling=SamplingParams())
    arrival = Arrival(sequence_id=1, request=request, eos_token_ids=frozenset(), sink=ListSink())
    for _ in range(3):
        inbox.submit(arrival)
    with pytest.raises(OverloadedError, match=r"3 requests .*\(max_queue \+ max_num_seqs\)"):
        inbox.submit(arrival)
