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
# Folders, files and tests whose promise a shorter one keeps in `make test`: most start many processes.
NIGHTLY = (
    "bench/",
    "engine/test_checkpoint_bit_identical.py::test_on_three_ranks",
    "fleet/test_agreement.py::test_a_rank_that_ran_out",  # comm/test_lost_ranks proves it without fleetrun
    "integrations/test_fabric.py::test_fabric_may_start",
    "launch/test_launch_elastic.py::test_a_node_that_freezes",
    "launch/test_launch_elastic.py::test_a_node_that_is_killed",
    "launch/test_launch_elastic.py::test_only_the_worker",
    "launch/test_launch_kills.py::test_workers_that_are_killed_at_random_moments",
    "launch/test_launch_restarts.py::test_restarted_workers_form_their_group_again",  # test_launch_resume proves it
    "launch/test_launch_warm.py::test_kill_9",
    "launch/test_schedulers.py::test_mpich",
    "launch/test_schedulers.py::test_two_nodes_of_a_scheduler",
    "optim/test_kernels.py::test_there_is_one_pool_of_threads",
    "paddle/static/test_fleetx_scripts.py::test_every_shape",
    "record/test_predicted_memory.py::test_so_is_that_of_groups_that_shard",
    "test_wheel.py",  # the workflow builds and tries the wheel
    "verify/test_verify.py::test_a_lossy_strategy_on_the_model_of_the_user",
)  # fmt: skip
# The same for cases of a test, by the beginning of their names. Many are contained in a longer case that remains.
NIGHTLY_CASES = {
    "applications/test_application_training.py::test_a_pipeline_is_cut_automatically": ["bert]"],
    "applications/test_application_training.py::test_two_ranks_equal_one": ["bert]"],
    "engine/test_checkpoint.py::test_from_four_ranks_to_two_and_back": [
        "four shards-two stages]", "four stages-two stages]",
    ],
    "engine/test_compile.py::test_a_compiled_model_trains_the_same_in_as_many_graphs_as_the_page_says": [
        "`adaptive", "`amp`, float16", "`clip", "`dgc", "`ema", "`fp16", "`lamb", "`lars", "`localsgd", "`muon",
        "`noise", "`quantized", "`sharding`, stage 2", "`sync_batch_norm", "`use_hier",
    ],
    "engine/test_compiled_examples.py::test_a_compiled_example_trains_in_graphs": [
        "bert]", "digits]", "finetune]", "image_folder]", "language_model]", "resnet]", "slow_network]",
    ],
    "integrations/test_transformers_trainer.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit": [
        "amp]", "dgc]", "localsgd]",
    ],
    "launch/test_launch_elastic.py::test_sigterm_on_one_node_lets_all_save_together": ["True]"],
    "launch/test_launch_preempted.py::test_a_job_whose_processes_all_get_sigterm_saves_and_ends_with_143": ["True]"],
    "measure/test_fake_optimizer.py::test_the_largest_batch_beside_a_scheduler_is_the_one_without": [
        "cosine]", "lambda]",
    ],
    "paddle/static/test_static_equals_eager.py::test_both_forms_give_the_same_losses_and_weights_bit_for_bit": [
        "amp + lamb]", "amp + lars]", "amp + recompute + lamb]", "amp + recompute]",
        "lamb + recompute]", "lars + recompute]",
    ],
    "parts/pipeline/test_cut_points.py::test_a_stage_can_begin_wherever_the_graph_allows": [
        "bert]", "llama]", "t5]", "vit]",
    ],
    "parts/recompute/test_budget.py::test_the_peak_is_as_predicted_and_within_the_budget": ["convolutions-adam]"],
    "parts/recompute/test_budget.py::test_training_under_a_budget_is_the_same_bit_for_bit": [
        "convolutions-min-", "transformer-0.8-{'amp'",
    ],
    "parts/recompute/test_odd_models.py::test_any_optimizer": ["adafactor]", "foreach]", "rmsprop]", "tensor rate]"],
    "parts/recompute/test_odd_models.py::test_with_the_strategies_that_update": ["{'clip'", "{'lars'"],
    "parts/recompute/test_transformers.py::test_they_train_the_same": ["gpt2-min]", "resnet-0.95]", "vit-0.95]"],
    "parts/test_auto.py::test_ranks_choose_the_same_plan_and_its_file_repeats_the_run_bit_for_bit": [
        "lossy]", "tried]",
    ],
    "parts/test_pipeline.py::test_replicas_reduce_as_the_strategy_says": ["dgc]", "sync_batch_norm]"],
    "parts/test_sharding.py::test_four_ranks": ["declared0]"],
    "parts/test_sharding_replicas.py::test_a_run_resumed_in_the_middle_is_bit_identical": [
        "{'adaptive_localsgd'", "{'dgc': {'sparsity': [0.9]}}]", "{'fp16_allreduce'",
        "{'localsgd': {'k_steps': 3, 'overlap': True, 'fragments'", "{'localsgd': {'k_steps': 4}}]",
        "{'quantized_allreduce': {'bits': 8, 'block': 8}", "{'localsgd': {'k_steps': 4}, 'dgc'",
    ],
    "planner/test_predicted_bytes.py::test_the_peak_of_an_update_on_two_ranks_is_within_two_percent_and_not_low": [
        "amp]", "fp16", "localsgd]", "plain]",
    ],
    "record/test_predicted_memory.py::test_each_rank_of_a_pipeline_predicts_its_own_peak_within_6_percent": [
        "1F1B", "GPipe",
    ],
    "record/test_predicted_memory.py::test_the_predicted_peak_is_at_most_3_percent_low_and_20_percent_high": [
        "merged]", "sharding-2", "sharding-bits]", "sharding-merged]", "sharding-one-segment", "sharding-recompute]",
    ],
}  # fmt: skip
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
    test, _, case = name.partition("[")
    return test.startswith(NIGHTLY) or case.startswith(tuple(NIGHTLY_CASES.get(test, ())))


def is_slow(place):
    """place: a path below tests/."""
    return any(f"/{name}" in f"/{place}" for name in SLOW)


# Files of long tests, with which a run begins.
LONG = ("launch/", "test_chaos", "cuda_paths/", "wide/", "test_examples", "verify/", "parts/test_auto")


def is_long(file):
    return file.removeprefix("tests/").startswith(LONG)
