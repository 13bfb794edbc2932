from __future__ import annotations

from collections.abc import Callable

import pytest

from stagewright.errors import SplitError, UnknownName
from stagewright.partition.named_cuts import cuts_by_name
from stagewright.profiler.profile import Profile

MakeProfile = Callable[..., Profile]


@pytest.fixture(scope="module")
def leaves(make_profile: MakeProfile) -> Profile:
    names = ["embed", "layer.0.attention", "layer.0.mlp", "layer.1.attention", "layer.1.mlp", "head"]
    return make_profile([1] * 6, names=names, blocks=[None, "layer.0", "layer.0", "layer.1", "layer.1", None])


def test_units_and_blocks(leaves: Profile) -> None:
    assert cuts_by_name(leaves, ["layer.0", "embed"]) == (0, 2)
    assert cuts_by_name(leaves, ["layer.1.attention"]) == (3,)
    assert cuts_by_name(leaves, []) == ()


def test_a_unit_takes_precedence_over_a_block_of_the_same_name(make_profile: MakeProfile) -> None:
    shared = make_profile([1] * 3, names=["layer", "layer@2", "head"], blocks=["layer", "layer", None])
    assert cuts_by_name(shared, ["layer"]) == (0,)


def test_wrong_names(leaves: Profile) -> None:
    with pytest.raises(UnknownName, match=r"unknown unit or block 'layer.2'; did you mean 'layer.1' or 'layer.0'"):
        cuts_by_name(leaves, ["layer.2"])
    with pytest.raises(SplitError, match="'head' is the last unit"):
        cuts_by_name(leaves, ["head"])
    with pytest.raises(SplitError, match=r"'layer.0.mlp' and 'layer.0' are the same cut"):
        cuts_by_name(leaves, ["layer.0", "layer.0.mlp"])
