import numpy as np

from ssd.errors import LinkError
from ssd.transport.frame import Frame, FrameKind
from ssd.transport.inprocess import Fault, InProcessChannel, pair


def frame(number: int) -> Frame:
    return Frame(FrameKind.TABLES, 1, number, np.zeros((1, 2), dtype=np.int32))


def started_pair() -> tuple[InProcessChannel, InProcessChannel, list[int]]:
    left, right = pair()
    received: list[int] = []
    right.start(lambda each: received.append(each.sequence_number), lambda _: None)
    return left, right, received


def test_each_fault_applies_to_one_of_the_next_frames() -> None:
    left, _, received = started_pair()
    left.script(Fault.DROP, Fault.DUPLICATE, Fault.NONE)
    for number in range(4):
        left.send(frame(number))
    assert received == [1, 1, 2, 3]


def test_a_reordered_frame_arrives_after_the_next_one() -> None:
    left, _, received = started_pair()
    left.script(Fault.REORDER)
    left.send(frame(1))
    assert received == []
    left.send(frame(2))
    left.send(frame(3))
    assert received == [2, 1, 3]


def test_delayed_frames_arrive_when_they_are_released() -> None:
    left, _, received = started_pair()
    left.script(Fault.DELAY, Fault.DELAY)
    for number in range(3):
        left.send(frame(number))
    assert received == [2]
    left.release()
    assert received == [2, 0, 1]


def test_a_frame_that_is_released_after_the_loss_never_arrives() -> None:
    left, right, received = started_pair()
    left.script(Fault.DELAY)
    left.send(frame(1))
    right.lose(LinkError("cut"))
    left.release()
    assert received == []


def test_a_frame_may_be_sent_inside_a_delivery() -> None:
    left, right = pair()
    received: list[int] = []
    left.start(lambda each: received.append(each.sequence_number), lambda _: None)
    right.start(lambda each: right.send(frame(each.sequence_number + 10)), lambda _: None)
    left.send(frame(1))
    left.send(frame(2))
    assert received == [11, 12]


def test_a_loss_before_the_start_is_reported_at_the_start() -> None:
    left, right = pair()
    left.close()
    received: list[int] = []
    losses: list[Exception] = []
    right.start(lambda each: received.append(each.sequence_number), losses.append)
    assert not received
    assert len(losses) == 1
