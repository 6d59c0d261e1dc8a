"""Which layer a test belongs to (see CONTRIBUTING). A test that is not listed is in all of them."""

from __future__ import annotations

from covering import every_value

SLOW = (
    "launch/", "integrations/", "record/", "report/", "parts/test_islands", "parts/test_wires", "test_compile",
    "test_critical_batch",
    "test_examples", "test_subsets", "test_release", "test_agreement", "test_checkpoint", "test_auto",
    "test_export", "test_predicted_bytes", "test_budget", "test_odd_models", "test_transformers", "test_largest_batch",
    "test_child",
    "test_bert_and_gpt2", "test_lost_rank", "parts/test_pipeline", "test_static_documents", "test_static_equals_eager",
    "test_static_imports", "test_download_", "test_application_training", "test_paths", "test_cut_points",
    "test_loss_weights", "test_multi_gpu_trainer", "test_exactness", "test_guests", "test_buffers", "test_sharding",
    "test_odd_gradients", "test_complex_parameters", "test_dgc", "test_payload", "test_kernels", "test_data_loader",
    "test_cuda_paths", "test_wide_worlds",
    "test_loops", "test_lost_ranks", "test_numbers", "test_unfreezing", "test_alone", "test_user_line",
    "test_torch_checkpoint", "test_compile", "test_metrics", "test_fake_optimizer", "test_triton",
)  # fmt: skip
# What proves no promise to a user, or what another test in `make test` proves in less time.
NIGHTLY = (
    "bench/",
    "launch/test_launch_elastic.py::test_a_node_that_freezes",  # 15 s until it counts as lost; kills are in make test
    "test_wheel.py",  # the workflow builds and tries the wheel
)
# Tests of which `make test` has every value of every parameter, and only `make nightly` every combination of them.
# That is enough, because verify trains every pair of strategies.
PRODUCTS = (
    "comm/test_paths.py::test_dgc_along_every_way",
    "engine/test_guests_of_torch.py::test_compiled_models",
    "engine/test_loops.py::test_one_rank_may_leave_out_the_last_batch_of_a_window",
    "engine/test_loss_weights.py::test_a_run_resumed_anywhere_is_the_unbroken_run_bit_for_bit",
    "engine/test_torch_checkpoint.py::test_an_optimizer_that_is_passed_itself_keeps_its_moments",
    "engine/test_torch_checkpoint.py::test_one_process_resumes",
    "integrations/test_transformers_trainer.py::test_two_ranks_equal_the_plain_trainer",
    "parts/recompute/test_odd_models.py::test_odd_models_train_the_same",
    "parts/test_batch_rampup.py::test_two_ranks_equal_one",
    "parts/test_islands.py::test_two_islands_equal_a_simulation",
    "parts/test_muon.py::test_ranks_that_divide_the_work_equal_one",
    "parts/test_sharding_loops.py::test_a_checkpoint_after_an_evaluation",
    "parts/test_sharding_loops.py::test_a_loop_equals_one_rank",
    "parts/test_sharding_loops.py::test_weights_give_the_big_batch",
    "parts/test_sharding_replicas.py::test_at_neutral_settings_it_is_data_parallelism",
    "parts/test_sharding_replicas.py::test_local_updates_between_groups_equal_a_simulation",
    "parts/test_sharding_replicas.py::test_other_ranks_take_over_the_mean_of_what_the_replicas_kept",
    "parts/test_wires.py::test_a_run_resumed_between_fragments_is_bit_identical",
    "parts/test_wires.py::test_a_run_resumed_in_the_middle_is_bit_identical",
    "parts/test_wires.py::test_fragments_equal_a_simulation",
    "parts/test_wires.py::test_the_exchange_of_local_updates_equals_a_simulation",
    "report/test_browser.py::test_it_opens_without_a_complaint_and_fits",
)


def left_out(cases):
    """The tests that only repeat values. cases: test -> values of its parameters, for one of PRODUCTS."""
    kept = set(every_value(list(cases.values())))
    return [test for test, values in cases.items() if values not in kept]


def is_nightly(name):
    """name: a test, with its path below tests/."""
    return name.startswith(NIGHTLY)


def is_slow(place):
    """place: a path below tests/."""
    return any(f"/{name}" in f"/{place}" for name in SLOW)


# Files of long tests, with which a run begins.
LONG = (
    "launch/", "test_chaos", "cuda_paths/", "wide/", "test_examples", "verify/", "parts/test_auto",
    "engine/test_compiled_examples", "integrations/test_fabric",
)  # fmt: skip


def is_long(file):
    return file.removeprefix("tests/").startswith(LONG)
