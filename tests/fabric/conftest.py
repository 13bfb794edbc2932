from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from stagewright.fabric.ranks.connections import Connections, listen


@pytest.fixture
def connect() -> Iterator[Callable[..., list[Connections]]]:
    """Ranks in this process that are connected over the loopback device."""
    with ExitStack() as stack:

        def make(num_ranks: int, streams: int = 1, **options: Any) -> list[Connections]:
            listeners = [stack.enter_context(listen("127.0.0.1", 8)) for _ in range(num_ranks)]
            addresses = [("127.0.0.1", one.getsockname()[1]) for one in listeners]
            made = [Connections(rank) for rank in range(num_ranks)]

            def open_one(rank: int) -> None:
                made[rank].open(
                    listeners[rank],
                    addresses,
                    [peer for peer in range(num_ranks) if peer != rank],
                    streams=streams,
                    session=b"s" * 16,
                    token=b"token",
                    options=options,
                )

            on_all(num_ranks, open_one)
            for one in made:
                stack.callback(one.close)
            return made

        yield make


def on_all(num_ranks: int, work: Callable[[int], Any], timeout_s: float = 120.0) -> list[Any]:
    """Do something at every rank at the same time; the first error is raised."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@pytest.fixture(name="on_all")
def _on_all() -> Callable[..., list[Any]]:
    return on_all
