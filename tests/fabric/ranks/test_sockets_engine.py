from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stagewright.errors import RunError
from stagewright.fabric.collectives.algorithms import ALGORITHMS, collective
from stagewright.fabric.collectives.program import compile_program, expected, payload
from stagewright.fabric.collectives.simulate import bytes_sent
from stagewright.fabric.ranks.connections import Connections, listen
from stagewright.fabric.ranks.flow import Flow
from stagewright.fabric.ranks.sockets_engine import SocketEngine

Connect = Callable[..., list[Connections]]
OnAll = Callable[..., list[Any]]
SLICE = 1000


def flows(rank: int, num_ranks: int, name: str, sizes: list[int], streams: int) -> list[Flow]:
    one = collective(name, num_ranks)
    return [
        Flow(at, one, range(num_ranks), rank, size, streams=streams, seed=3, slice_bytes=SLICE)
        for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("num_ranks", "streams"), [(1, 1), (2, 1), (3, 2), (4, 1), (5, 3)])
def test_sums_are_right(name: str, num_ranks: int, streams: int, connect: Connect, on_all: OnAll) -> None:
    sizes = [1, 4, 8, 2600, 33021, 120_000]
    ends = connect(num_ranks, streams)

    def work(rank: int) -> list[bool]:
        engine = SocketEngine(ends[rank], num_ranks, scratch_bytes=SLICE + 64)
        own = flows(rank, num_ranks, name, sizes, streams)
        right = []
        for trial in range(3):
            for flow in own:
                flow.reset(trial)
                engine.barrier(trial)
                engine.run(flow, trial)
                right.append(flow.is_correct(trial))
        for flow in own:
            flow.reset(3)
        engine.barrier(3)
        now = time.perf_counter()
        # Ranks launch in their own time: messages arrive before their receivers have begun them.
        engine.run_overlapped(own, [now + 0.002 * at * (rank + 1) for at in range(len(own))], 3)
        return right + [flow.is_correct(3) for flow in own]

    for right in on_all(num_ranks, work):
        assert all(right)
        assert len(right) == 4 * len(sizes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_program_sends_what_the_moves_say(name: str) -> None:
    for num_ranks in (1, 2, 3, 6):
        for size in (0 + 1, 10, 4096, 1_000_003):
            one = collective(name, num_ranks)
            item = 4 if size % 4 == 0 else 1
            sent = [item * items for items in bytes_sent(one, size // item)]
            programs = [compile_program(one, rank, size, streams=2, slice_bytes=SLICE) for rank in range(num_ranks)]
            assert [sum(send.size for send in program.sends) for program in programs] == sent
            for rank, program in enumerate(programs):
                for peer in range(num_ranks):
                    for stream in range(2):
                        there = [
                            (send.step, send.size)
                            for send in program.sends
                            if (send.peer, send.stream) == (peer, stream)
                        ]
                        here = [
                            (take.step, take.size)
                            for take in programs[peer].receives
                            if (take.peer, take.stream) == (rank, stream)
                        ]
                        assert there == here, "both ends must agree on the order"


def test_a_wrong_sum_is_seen() -> None:
    one = collective("ring", 3)
    flow = Flow(0, one, range(3), 0, 400, streams=1, seed=0, slice_bytes=SLICE)
    program = compile_program(one, 0, 400)
    assert not flow.is_correct(0), "the payload itself is not the sum"
    np.copyto(flow.array, expected(one, program, 400, 0, 0)[0])
    assert flow.is_correct(0)
    assert not flow.is_correct(1), "another trial has another sum"
    flow.array[17] += 1
    assert not flow.is_correct(0)
    assert not np.array_equal(payload(one, program, 400, 0, 0), payload(one, program, 400, 0, 1))


def test_who_is_waited_for_is_noted(connect: Connect, on_all: OnAll) -> None:
    ends, trials = connect(3), 5

    def work(rank: int) -> list[list[float]]:
        engine = SocketEngine(ends[rank], 3, scratch_bytes=SLICE + 64)
        (flow,) = flows(rank, 3, "ring", [3000], 1)
        sums = [[0.0] * 3]
        for trial in range(trials):
            flow.reset(trial)
            engine.barrier(trial)
            if rank == 1:
                time.sleep(0.1)
            engine.run(flow, trial)
            sums.append(list(engine.receive_wait_s))
        return sums

    sums = np.array(on_all(3, work))
    waits = np.diff(sums, axis=1)  # by rank, trial and the one who is waited for
    # A busy machine may hold up any of them in one trial or another.
    assert waits[2, :, 1].max() > 0.09, "rank 2 waits for rank 1"
    assert waits[1, :, 0].min() < 0.05, "what rank 1 needs is there"


def test_a_lost_peer_is_named(connect: Connect, on_all: OnAll) -> None:
    ends = connect(3)

    def work(rank: int) -> str:
        engine = SocketEngine(ends[rank], 3, scratch_bytes=SLICE + 64)
        (flow,) = flows(rank, 3, "ring", [3000], 1)
        if rank == 1:
            ends[rank].shut_down()
            return ""
        with pytest.raises(RunError) as failure:
            engine.run(flow, 0)
        ends[rank].shut_down()  # as a rank does that fails
        return str(failure.value)

    told = on_all(3, work)
    assert told[2] == "rank 2 lost its connection to rank 1"


def test_ranks_out_of_step_are_reported(connect: Connect, on_all: OnAll) -> None:
    ends = connect(2)

    def work(rank: int) -> str:
        engine = SocketEngine(ends[rank], 2, scratch_bytes=SLICE + 64)
        with pytest.raises(RunError) as failure:
            engine.barrier(rank)
        return str(failure.value)

    assert "out of step" in on_all(2, work)[0]


def test_strangers_are_turned_away(on_all: OnAll) -> None:
    with listen("127.0.0.1", 4) as listener, listen("127.0.0.1", 4) as other:
        addresses = [("127.0.0.1", one.getsockname()[1]) for one in (listener, other)]
        with socket.create_connection(addresses[0]) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 200)
            ends = [Connections(0), Connections(1)]

            def work(rank: int) -> None:
                token = b"one"
                ends[rank].open(
                    (listener, other)[rank], addresses, [1 - rank], streams=1, session=b"s" * 16, token=token
                )

            on_all(2, work)
            assert set(ends[0].sockets) == {(1, 0)}
            for one in ends:
                one.close()
