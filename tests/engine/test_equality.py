"""The proof's own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from stagewright.engine.equality import full_precision


def allow_by_product() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def refuse_by_convolution() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


WAYS: dict[str, Callable[[], None]] = {
    "not at all": lambda: None,
    "older": lambda: torch.set_float32_matmul_precision("medium"),
    "newer": allow_by_product,
    "newer, of one kind": refuse_by_convolution,
}


def told() -> list[object]:
    """What is set, in both of torch's ways; it refuses to tell the older one where they are mixed."""
    newer = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    found: list[object] = [one.fp32_precision == "tf32" for one in newer]
    for older in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(older())
        except RuntimeError:
            found.append("mixed")
    return found


@pytest.fixture
def settings() -> Iterator[None]:
    """As a process begins, before and after."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("way", WAYS)
def test_a_proof_uses_no_tf32_and_leaves_what_was_allowed(way: str, settings: None) -> None:
    WAYS[way]()
    before = told()
    with full_precision():
        assert told()[:3] == [False, False, False]
    assert told() == before
