from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from stagewright.errors import UnknownName, UsageError
from stagewright.fabric.collectives.algorithms import ALGORITHMS, ALL_REDUCE, bus_factor, collective
from stagewright.fabric.collectives.collective import Collective, Move, chunk_bounds
from stagewright.fabric.collectives.simulate import bytes_sent, ideal_s


def execute(
    collective: Collective, buffers: Sequence[dict[int, npt.NDArray[np.float64]]]
) -> list[dict[int, npt.NDArray[np.float64]]]:
    """Apply the moves to each rank's chunks and return the result."""
    held = [{chunk: values.copy() for chunk, values in chunks.items()} for chunks in buffers]
    for _, moves in itertools.groupby(collective.moves, key=lambda move: move.step):
        arriving = [(move, held[move.source][move.chunk].copy()) for move in moves]
        for move, values in arriving:
            if move.action == "reduce" and move.chunk in held[move.destination]:
                values = held[move.destination][move.chunk] + values
            held[move.destination][move.chunk] = values
    return held


def find_errors(collective: Collective) -> list[str]:
    """Return the errors of the moves as sentences; empty if the result is correct.

    Moves of a step read the state before the step. In one step a rank must not both write and send a chunk, nor copy
    into it twice: an engine would send a mix of both.
    """
    held = dict(collective.before)
    errors = []
    for step, moves in itertools.groupby(collective.moves, key=lambda move: move.step):
        snapshot = dict(held)
        sent = set()
        written: set[tuple[int, int]] = set()
        for move in moves:
            source, destination = (move.source, move.chunk), (move.destination, move.chunk)
            if move.source == move.destination:
                errors.append(f"step {step}: rank {move.source} sends chunk {move.chunk} to itself")
            if source not in snapshot:
                errors.append(f"step {step}: rank {move.source} sends chunk {move.chunk}, which it does not have")
                continue
            sent.add(source)
            if move.action == "reduce":
                if held.get(destination, 0) & snapshot[source]:
                    errors.append(f"step {step}: rank {move.destination} reduces a value into chunk {move.chunk} twice")
                held[destination] = held.get(destination, 0) | snapshot[source]
            else:
                if destination in written:
                    errors.append(f"step {step}: chunk {move.chunk} of rank {move.destination} is written twice")
                held[destination] = snapshot[source]
            written.add(destination)
        errors += [f"step {step}: rank {rank} sends chunk {chunk} while it changes" for rank, chunk in sent & written]
    for (rank, chunk), expected in collective.after.items():
        if held.get((rank, chunk)) != expected:
            errors.append(f"at the end chunk {chunk} of rank {rank} is {held.get((rank, chunk))}, expected {expected}")
    return errors


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", [*range(1, 18), 24, 31, 32, 33])
def test_every_algorithm_is_right_for_any_number_of_ranks(name: str, num_ranks: int) -> None:
    assert find_errors(collective(name, num_ranks)) == []


@given(
    name=st.sampled_from(sorted(ALL_REDUCE)), num_ranks=st.integers(1, 12), size=st.integers(0, 70), seed=st.integers(0)
)
def test_all_reduce_is_the_sum(name: str, num_ranks: int, size: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(-50, 50, (num_ranks, size)).astype(np.float64)
    one = collective(name, num_ranks)
    bounds = chunk_bounds(size, one.num_chunks)
    parts = list(itertools.pairwise(bounds))
    after = execute(one, [{chunk: row[begin:end] for chunk, (begin, end) in enumerate(parts)} for row in values])
    for own in after:
        whole = np.concatenate([own[chunk] for chunk in range(one.num_chunks)])
        np.testing.assert_array_equal(whole, values.sum(axis=0))


@given(num_ranks=st.integers(1, 9), size=st.integers(0, 40))
def test_all_to_all_is_a_transposition(num_ranks: int, size: int) -> None:
    one = collective("all-to-all", num_ranks)
    bounds = chunk_bounds(size, num_ranks)
    own = [
        {rank * num_ranks + to: np.arange(bounds[to], bounds[to + 1]) + 1000.0 * rank for to in range(num_ranks)}
        for rank in range(num_ranks)
    ]
    after = execute(one, own)
    for rank in range(num_ranks):
        for source in range(num_ranks):
            np.testing.assert_array_equal(
                after[rank][source * num_ranks + rank], np.arange(bounds[rank], bounds[rank + 1]) + 1000.0 * source
            )


@given(num_ranks=st.integers(1, 16), size=st.integers(0, 10**6))
def test_bytes_equal_theory(num_ranks: int, size: int) -> None:
    n = num_ranks
    assert sum(bytes_sent(collective("ring", n), size)) == 2 * (n - 1) * size
    assert sum(bytes_sent(collective("bidirectional-ring", n), size)) == 2 * (n - 1) * size
    assert sum(bytes_sent(collective("reduce-scatter", n), size)) == (n - 1) * size
    assert sum(bytes_sent(collective("all-gather", n), size)) == (n - 1) * size
    assert sum(bytes_sent(collective("double-tree", n), size)) == 2 * (n - 1) * size
    assert sum(bytes_sent(collective("broadcast", n), size)) == (n - 1) * size
    assert sum(bytes_sent(collective("pipeline", n), size)) == (n - 1) * size
    p = 1 << (n.bit_length() - 1)
    # Each of p ranks gives away (p − 1)/p and gets it back; each rank above p gives all and gets all.
    assert sum(bytes_sent(collective("halving-doubling", n), size)) == 2 * (p - 1) * size + 2 * (n - p) * size
    # Of all-to-all everything but each rank's own chunk travels.
    bounds = chunk_bounds(size, n)
    own = sum(bounds[rank + 1] - bounds[rank] for rank in range(n))
    assert sum(bytes_sent(collective("all-to-all", n), size)) == n * size - own


@given(num_ranks=st.integers(2, 16), chunks=st.integers(1, 1000))
def test_no_rank_of_a_ring_sends_more_than_its_share(num_ranks: int, chunks: int) -> None:
    size = num_ranks * 2 * chunks
    for name in ("ring", "bidirectional-ring"):
        assert set(bytes_sent(collective(name, num_ranks), size)) == {2 * (num_ranks - 1) * size // num_ranks}
    assert max(bytes_sent(collective("double-tree", num_ranks), size)) <= 2 * size


def test_a_ring_of_three_is_as_drawn() -> None:
    moves = [move for move in collective("ring", 3).moves if move.chunk == 0]
    assert moves == [
        Move(0, 0, 1, 0, "reduce"),
        Move(1, 1, 2, 0, "reduce"),
        Move(2, 2, 0, 0, "copy"),
        Move(3, 0, 1, 0, "copy"),
    ]


def test_trees_share_the_inner_work() -> None:
    for num_ranks in range(3, 20):
        inner = [set(), set()]
        for move in collective("double-tree", num_ranks).moves:
            if move.action == "reduce":
                inner[move.chunk].add(move.destination)
        assert not inner[0] & inner[1], num_ranks


def test_wrong_moves_are_found() -> None:
    right = collective("ring", 4)
    lost = replace(right, moves=right.moves[:-1])
    assert any("at the end" in error for error in find_errors(lost))
    twice = replace(right, moves=(*right.moves[:4], *right.moves))
    assert any("twice" in error for error in find_errors(twice))
    nothing = replace(collective("broadcast", 2), moves=(Move(0, 1, 0, 0, "copy"),))
    assert any("does not have" in error for error in find_errors(nothing))


def test_ideal_time() -> None:
    # 64 MiB on 4 ranks at 1 Gbit: 2·3/4·S/B, and 6 latencies.
    size = 64 * 2**20
    assert ideal_s(collective("ring", 4), size, 0.0, 125e6) == pytest.approx(1.5 * size / 125e6)
    assert ideal_s(collective("ring", 4), 0, 1e-3, 125e6) == pytest.approx(6e-3)
    assert ideal_s(collective("halving-doubling", 8), size, 0.0, 125e6) == pytest.approx(2 * 7 / 8 * size / 125e6)
    assert ideal_s(collective("halving-doubling", 8), 0, 1e-3, 125e6) == pytest.approx(6e-3)


def test_bus_bandwidth_is_as_nccl_tests_define_it() -> None:
    assert bus_factor("all-reduce", 4) == 1.5
    assert bus_factor("all-gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_unknown_names_and_numbers() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ring'"):
        collective("rings", 4)
    with pytest.raises(UsageError, match="0 ranks"):
        collective("ring", 0)
