import numpy as np

from ssd.errors import LinkError
from ssd.transport.frame import Frame, FrameKind
from ssd.transport.inprocess import Fault, InProcessChannel, pair


def frame(number: int) -> Frame:
    return Frame(FrameKind.TABLES, 1, number, np.zeros((1, 2), dtype=np.int32))


def listening_pair() -> tuple[InProcessChannel, InProcessChannel, list[int]]:
    left, right = pair()
    heard: list[int] = []
    right.start(lambda each: heard.append(each.sequence_number), lambda _: None)
    return left, right, heard


def test_faults_befall_the_next_frames_one_each() -> None:
    left, _, heard = listening_pair()
    left.script(Fault.DROP, Fault.DUPLICATE, Fault.NONE)
    for number in range(4):
        left.send(frame(number))
    assert heard == [1, 1, 2, 3]


def test_a_reordered_frame_arrives_after_the_next_one() -> None:
    left, _, heard = listening_pair()
    left.script(Fault.REORDER)
    left.send(frame(1))
    assert heard == []
    left.send(frame(2))
    left.send(frame(3))
    assert heard == [2, 1, 3]


def test_delayed_frames_wait_for_their_release() -> None:
    left, _, heard = listening_pair()
    left.script(Fault.DELAY, Fault.DELAY)
    for number in range(3):
        left.send(frame(number))
    assert heard == [2]
    left.release()
    assert heard == [2, 0, 1]


def test_a_frame_delayed_past_the_end_never_arrives() -> None:
    left, right, heard = listening_pair()
    left.script(Fault.DELAY)
    left.send(frame(1))
    right.lose(LinkError("cut"))
    left.release()
    assert heard == []


def test_an_answer_may_be_sent_from_inside_a_delivery() -> None:
    left, right = pair()
    heard: list[int] = []
    left.start(lambda each: heard.append(each.sequence_number), lambda _: None)
    right.start(lambda each: right.send(frame(each.sequence_number + 10)), lambda _: None)
    left.send(frame(1))
    left.send(frame(2))
    assert heard == [11, 12]


def test_a_loss_before_the_start_is_told_at_the_start() -> None:
    left, right = pair()
    left.send(frame(1))
    left.close()
    heard: list[int] = []
    losses: list[Exception] = []
    right.start(lambda each: heard.append(each.sequence_number), losses.append)
    assert heard == [1]
    assert len(losses) == 1
