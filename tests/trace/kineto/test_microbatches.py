"""Which runs of compute are micro-batches; times in milliseconds."""

from collections.abc import Sequence

from stagewright.trace.kineto.microbatches import Message, Run, number_microbatches
from stagewright.trace.kineto.profile_file import CommunicationSpan, Phase


def _message(content: str, name: str, number: int, start: float, end: float) -> Message:
    span = CommunicationSpan(
        start_s=start,
        end_s=end,
        name=name,
        group="",
        group_ranks=(),
        axis="pipeline",
        peer=1,
        bytes=None,
        phase="forward",
    )
    return Message(span=span, peer=1, content=content, microbatch=number)


def _runs(phase: Phase, *spans: tuple[float, float]) -> list[Run]:
    return [(phase, start, end, end - start) for start, end in spans]


FIRST_STAGE = [
    *(_message("activation", "send", number, 10 + 10 * number, 12 + 10 * number) for number in range(2)),
    *(_message("gradient", "receive", number, 25, 30 + 20 * number) for number in range(2)),
]
LAST_STAGE = [
    *(_message("activation", "receive", number, 0, 10 + 20 * number) for number in range(2)),
    *(_message("gradient", "send", number, 25 + 20 * number, 26 + 20 * number) for number in range(2)),
]


def _numbered(runs: Sequence[Run], messages: Sequence[Message]) -> dict[tuple[float, float], int]:
    return {runs[index][1:3]: number for index, number in number_microbatches(runs, messages).items()}


def test_copies_of_gradients_that_took_long_are_no_micro_batch() -> None:
    runs = [*_runs("forward", (0, 9), (12, 20)), *_runs("backward", (30, 40), (50, 60)), *_runs("forward", (60, 90))]

    assert _numbered(runs, FIRST_STAGE) == {(0, 9): 0, (12, 20): 1, (30, 40): 0, (50, 60): 1}


def test_work_between_the_messages_is_shorter_than_the_micro_batch() -> None:
    runs = [
        *_runs("forward", (11, 12), (13, 19), (19, 20)),
        *_runs("backward", (20, 24)),
        *_runs("forward", (31, 37)),
        *_runs("backward", (38, 44)),
    ]

    assert _numbered(runs, LAST_STAGE) == {(13, 19): 0, (20, 24): 0, (31, 37): 1, (38, 44): 1}


def test_runs_that_fit_no_message_have_no_number() -> None:
    assert _numbered(_runs("forward", (30, 40), (40, 50)), FIRST_STAGE) == {}
    assert _numbered(_runs("forward", (30, 40)), []) == {}
