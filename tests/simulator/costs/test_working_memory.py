"""What operators take while a stage runs: units put one after the other, and the peak of a worker with it."""

from __future__ import annotations

from dataclasses import replace

from stagewright.profiler.profile import Amount, Time, UnitProfile
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.simulator.costs.working_memory import NO_WORKING_MEMORY, StageWorkingMemory, stage_working_memory

NEVER = Time(median_s=0.0, spread_s=0.0)
UNIT = UnitProfile(
    name="unit",
    kind="Linear",
    block=None,
    parameters=Amount(total=5),
    parameter_bytes=Amount(total=20),
    buffer_bytes=0,
    macs=0,
    forward=NEVER,
    backward_input=NEVER,
    backward_weight=NEVER,
    output_bytes=10,
    saved_bytes=Amount(total=30),
    recompute_saved_bytes=10,
    crossing_bytes=10,
    forward_working_bytes=45,
    backward_working_bytes=70,
)
TERMS = ModelOverheads(loss_kept_bytes=3, loss_forward_working_bytes=8, loss_backward_working_bytes=9)
UNITS = (UNIT, UNIT, UNIT)


def test_forward_stands_on_what_units_before_have_kept() -> None:
    assert stage_working_memory(UNITS, 0, 1, TERMS, recomputed=False, training=True).forward_bytes == 30 + 45


def test_a_recomputed_stage_keeps_only_the_result_before() -> None:
    assert stage_working_memory(UNITS, 0, 1, TERMS, recomputed=True, training=True).forward_bytes == 10 + 45


def test_inference_keeps_only_the_result_before_and_has_no_loss() -> None:
    assert stage_working_memory(UNITS, 1, 2, TERMS, recomputed=False, training=False) == StageWorkingMemory(
        forward_bytes=10 + 45
    )


def test_backward_gives_back_what_units_behind_kept_and_holds_the_gradients_they_made() -> None:
    found = stage_working_memory(UNITS, 0, 1, TERMS, recomputed=False, training=True)
    assert found.first_backward_bytes == 10 + 70  # the last unit, where nothing has been given back yet
    large = replace(UNIT, backward_working_bytes=100)
    found = stage_working_memory((large, UNIT, UNIT), 0, 1, TERMS, recomputed=False, training=True)
    assert found.first_backward_bytes == 20 - 30 + 10 + 100
    assert found.later_backward_bytes == -30 + 10 + 100


def test_a_tied_weights_gradient_waits_for_its_first_use() -> None:
    head = replace(UNIT, parameter_bytes=Amount(total=20, shares=((0, 15),)))
    found = stage_working_memory((UNIT, UNIT, head, UNIT), 0, 2, TERMS, recomputed=False, training=True)
    plain = stage_working_memory((UNIT, UNIT, UNIT, UNIT), 0, 2, TERMS, recomputed=False, training=True)
    assert found.first_backward_bytes == plain.first_backward_bytes == 80  # the last unit is the highest place
    large = replace(UNIT, backward_working_bytes=200)
    found = stage_working_memory((large, UNIT, head, UNIT), 0, 2, TERMS, recomputed=False, training=True)
    assert found.later_backward_bytes == 15 - 2 * 30 + 10 + 200
    assert found.first_backward_bytes == 2 * 20 - 2 * 30 + 10 + 200
    found = stage_working_memory(
        (large, UNIT, head, UNIT), 1, 2, TERMS, recomputed=False, training=True
    )  # tied to another stage
    assert found.later_backward_bytes == 80


def test_the_loss_belongs_to_the_last_stage() -> None:
    greedy = replace(TERMS, loss_forward_working_bytes=500, loss_backward_working_bytes=600)
    found = stage_working_memory(UNITS, 1, 2, greedy, recomputed=False, training=True)
    assert (found.forward_bytes, found.first_backward_bytes) == (2 * 30 + 500, 600)
    assert stage_working_memory(UNITS, 0, 1, greedy, recomputed=False, training=True).forward_bytes == 30 + 45


def test_where_a_stage_runs_again_the_loss_has_gone_before() -> None:
    greedy = replace(TERMS, loss_backward_working_bytes=600)
    found = stage_working_memory(UNITS, 1, 2, greedy, recomputed=True, training=True)
    assert found.first_backward_bytes == 600 + 3 - 2 * 30
    found = stage_working_memory(UNITS, 1, 2, TERMS, recomputed=True, training=True)
    assert found.first_backward_bytes == 10 + 70


def test_sharded_units_are_gathered_and_leave_a_part_of_their_gradients_behind() -> None:
    units = (replace(UNIT, backward_working_bytes=200), UNIT, UNIT)
    fixed = {"recomputed": False, "training": True}
    plain = stage_working_memory(units, 0, 1, TERMS, **fixed)
    whole = stage_working_memory(units, 0, 1, TERMS, recomputed=False, training=True, gathered=(20, 20, 20))
    half = stage_working_memory(
        units, 0, 1, TERMS, recomputed=False, training=True, gathered=(20, 20, 20), held_share=0.5
    )
    assert whole.forward_bytes - plain.forward_bytes == 2 * 20
    assert whole.first_backward_bytes - plain.first_backward_bytes == 20 + 20  # its own, and the gradients behind it
    assert whole.first_backward_bytes - half.first_backward_bytes == 10
    tied = stage_working_memory(
        units, 0, 1, TERMS, recomputed=False, training=True, gathered=(20, 0, 20), held_share=0.5
    )
    assert tied.first_backward_bytes == plain.first_backward_bytes + 20  # gradients of what is not alone stay whole


def test_a_large_unit_is_there_twice_while_it_is_gathered_for_backward() -> None:
    units = (replace(UNIT, backward_working_bytes=0), UNIT)
    found = stage_working_memory(units, 0, 1, TERMS, recomputed=False, training=True, gathered=(500, 20))
    level = -TERMS.loss_kept_bytes + 20 - 30  # the unit behind has gone backward
    assert found.first_backward_bytes == level + 10 + 2 * 500 + 20


def test_the_inputs_half_of_a_backward_lets_go_of_nothing_and_makes_no_gradients_of_weights() -> None:
    found = stage_working_memory(UNITS, 0, 1, TERMS, recomputed=False, training=True)
    assert found.input_backward_bytes == 10 + 70 - 20
    assert found.weight_backward_bytes == 20 + 10


def test_a_cpu_tells_nothing() -> None:
    silent = replace(UNIT, forward_working_bytes=0, backward_working_bytes=0)
    assert stage_working_memory((silent, silent), 0, 1, TERMS, recomputed=False, training=True) == NO_WORKING_MEMORY
