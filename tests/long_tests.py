"""Tests that `make test` leaves to `make test-long`: each takes several seconds, and a smaller test covers its code.

Patterns of test ids; `*` matches anything. CI runs both targets.
"""

LONG = (
    # Whole scripts and processes; in-process tests of the same modules stay in `make test`.
    "tests/engine/parallel/test_trainer.py::test_parallelize_in_a_user_script",
    "tests/engine/worker/test_user_loop.py::test_under_torchrun*",
    "tests/engine/worker/test_faults.py::test_sigterm_*",
    "tests/engine/worker/test_faults.py::test_a_launcher_that_is_killed*",
    "tests/engine/launch/test_launcher.py::test_a_script_without_a_guard*",
    "tests/engine/launch/test_two_machines.py::*",
    "tests/engine/state/test_checkpoint.py::test_killed_run_resumes*",
    "tests/report/live/test_real_run.py::*",
    "tests/engine/jobs/test_shared_gpu.py::test_parity_check_runs_on_a_cpu",
    # Meshes: 2 workers of each axis stay.
    "tests/engine/jobs/test_compare.py::*[[]data=2,tensor=2,pipeline=2-*",
    "tests/engine/jobs/test_compare.py::*[[]data=2,pipeline=2-*",
    "tests/engine/jobs/test_compare.py::*[[]tensor=2,pipeline=2-*",
    "tests/engine/jobs/test_compare.py::test_batch_norm_in_deferred_mode*",
    "tests/engine/data/test_clipping.py::test_matches_torch_on_meshes*",
    "tests/codecs/test_links.py::test_three_workers*",
    "tests/codecs/test_links.py::test_meshes*",
    "tests/codecs/test_links.py::test_two_workers[[]gpipe*",
    "tests/codecs/test_links.py::test_two_workers[[]interleaved*",
    "tests/codecs/test_links.py::test_two_workers[[]looped-bfs*",
    "tests/codecs/test_links.py::test_two_workers[[]dualpipev*",
    "tests/codecs/test_links.py::test_codecs[[]*[0-9]]",
    "tests/codecs/test_links.py::test_state_is_in_the_checkpoint*",
    "tests/engine/jobs/test_compare.py::test_unusual_models[[]*=2*",
    "tests/engine/jobs/test_families.py::*",
    # Forecasts against real runs: the pipeline stays.
    "tests/planner/costs/test_bytes.py::*data=2*",
    "tests/planner/costs/test_bytes.py::*tensor=2*",
    "tests/planner/costs/test_inference_memory.py::*data=2*",
    "tests/planner/costs/test_measure.py::*batch_norm*",
    # Models: one small model of each kind stays.
    "tests/machine/test_cpu_offload.py::*mobilenet-v2*",
    "tests/machine/test_cpu_offload.py::*[[]leaf]",
    "tests/graph/test_families.py::*mobilenet-v2-*",
    "tests/graph/test_families.py::*u-net-*",
    "tests/planner/costs/test_layer_scaling.py::*",
    "tests/graph/test_families.py::*segformer-True*",
    "tests/graph/test_families.py::*swin-*",
    # Pages and JSON of verbs that run workers.
    "tests/docs/test_json_page.py::test_trace",
    "tests/docs/test_json_page.py::test_doctor",
    "tests/docs/test_cli_page.py::test_cli_page_is_current",
    "tests/docs/test_schedule_pictures.py::*",
    "tests/trace/test_trace.py::*operators*",
)
