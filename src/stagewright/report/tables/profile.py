"""A profile as a table: one row a unit call, and how well the units explain the whole."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.profiler.profile import Profile, Time
from stagewright.quantity import format_bytes, format_count, format_s

__all__ = ["profile_table"]


def profile_table(profile: Profile) -> Table:
    """What each unit costs, with sums and, below them, the whole model measured in the same rounds."""
    mode = "training" if profile.training else "inference"
    table = Table(
        title=f"{escape(profile.model)}: batch {profile.batch_size}, {profile.dtype}, {mode}, {escape(profile.device)}",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        title_justify="left",
    )
    units = profile.units
    forward_s = sum(unit.forward.median_s for unit in units)
    backward_input_s = sum(unit.backward_input.median_s for unit in units)
    backward_weight_s = sum(unit.backward_weight.median_s for unit in units)
    table.add_column("unit", f"{len(units)} units", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("parameters", format_count(profile.parameters), justify="right")
    table.add_column("MACs", format_count(sum(unit.macs for unit in units)), justify="right")
    table.add_column("forward", format_s(forward_s), justify="right")
    if profile.training:
        table.add_column("backward (input)", format_s(backward_input_s), justify="right")
        table.add_column("backward (weight)", format_s(backward_weight_s), justify="right")
    table.add_column("output", justify="right")
    table.add_column("crosses after", justify="right")
    if profile.training:
        table.add_column("kept", format_bytes(profile.kept_bytes), justify="right")
        table.add_column("kept, recomputed", justify="right")
    for unit in units:
        cells = [escape(unit.name), escape(unit.kind), format_count(unit.parameters.total), format_count(unit.macs)]
        cells.append(_time(unit.forward))
        if profile.training:
            cells += [_time(unit.backward_input), _time(unit.backward_weight)]
        cells += [format_bytes(unit.output_bytes), format_bytes(unit.crossing_bytes)]
        if profile.training:
            cells += [format_bytes(unit.kept_bytes.total), format_bytes(unit.recompute_kept_bytes)]
        table.add_row(*cells)
    whole, summed = "whole model: not measured, for it does not fit on the device", ""
    if profile.has_whole:
        whole = f"whole model: forward {format_s(profile.whole_forward.median_s)}"
        if profile.training:
            whole += f", backward {format_s(profile.whole_backward.median_s)}"
        summed = f"; units sum to {profile.coverage:.1%} of its time"
    if profile.glue_share >= 0.005:
        summed += f", {profile.glue_share:.1%} of that for what lies between them and runs in their stages"
    table.caption = f"{whole}, {format_count(profile.whole_macs)} MACs{summed}"
    table.caption_justify = "left"
    return table


def _time(time: Time) -> str:
    """Median ± half the interquartile range, in percent."""
    if time.median_s == 0:
        return "–"
    return f"{format_s(time.median_s)} ±{50 * time.spread_s / time.median_s:.0f}%"
