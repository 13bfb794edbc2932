"""``stagewright profile``: measure the cost of each unit of a model."""

from __future__ import annotations

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import Json, ModelName, ProfileOptions
from stagewright.cli.screen import note, note_coverage, print_json, print_table


@with_groups
def profile(model: ModelName, json: Json = False, *, options: ProfileOptions) -> None:
    """Measure each unit of a model: parameters, MACs, forward and backward time, saved activations."""
    device = options.begin(model)
    result = options.profile(model, *options.capture(model, device), device)
    if json:
        print_json({**result.to_dict(), "coverage": result.coverage, "source": result.source})
        return
    print_table(result.table())
    note(f"times: {result.source}")
    note_coverage(result.coverage)
