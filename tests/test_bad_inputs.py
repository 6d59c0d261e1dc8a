"""Thirty bad inputs, and the tests that hold them off. docs/results/bad_inputs.md is this table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "results" / "bad_inputs.md"
LISTS = "paddle/download/test_download_layout::test_lists_with_bad_lines_are_refused_by_line"
INPUTS = "paddle/download/test_download_inputs::"
FAULTS = "paddle/download/test_download_faults::"
TARS = "paddle/download/test_download_tars::"
STRATEGY = "strategy/test_strategy_inputs::"
SAFETY = "engine/test_checkpoint_safety::"
NUMBERS = "engine/test_numbers::"

TABLE = [
    ("a listed path with `..`", [LISTS, INPUTS + "test_any_list_is_downloaded_or_refused_with_nothing_outside"]),
    ("an absolute path", [LISTS]),
    ("a path through a link in the target", [
        INPUTS + "test_a_link_in_the_folder_does_not_lead_a_file_out",
        INPUTS + "test_a_link_in_the_folder_does_not_lead_a_member_out",
    ]),
    ("two entries whose paths are equal, or differ only in case or Unicode form", [
        LISTS, INPUTS + "test_names_that_many_file_systems_hold_to_be_one_are_refused",
    ]),
    ("names: empty, NUL, 300 bytes, `-rf`, `CON`, newline", [
        INPUTS + "test_names_with_control_characters_are_refused_and_shown_without_them",
        INPUTS + "test_a_name_longer_than_the_disk_allows_fails_by_name",
        INPUTS + "test_odd_names_that_are_fine_here_are_downloaded",
        INPUTS + "test_a_newline_in_a_member_is_refused",
    ]),
    ("md5: wrong length, upper case, digits, missing, null", [
        INPUTS + "test_what_is_no_md5_is_refused_by_line", INPUTS + "test_any_spelling_of_an_md5_is_read",
    ]),
    ("`!!python/object/apply` in YAML", [
        "strategy/test_strategy::test_bad_yaml_raises_with_its_file",
        "paddle/download/test_download_layout::test_a_yaml_that_is_wrong_says_so",
    ]),
    ("an alias bomb, 100 MB of YAML", [
        STRATEGY + "test_bad_yaml_is_refused_in_a_short_message",
        STRATEGY + "test_a_file_of_100_mb_is_refused_without_reading_it",
        INPUTS + "test_a_yaml_of_100_mb_is_refused",
    ]),
    ("YAML: duplicate and unknown keys, wrong types, `no`, BOM, tabs, latin-1", [
        STRATEGY + "test_any_text_gives_a_strategy_that_survives_yaml_or_its_error",
        STRATEGY + "test_a_byte_order_mark_is_no_part_of_the_first_name",
        INPUTS + "test_a_bad_yaml_is_refused", INPUTS + "test_any_yaml_gives_an_address_or_our_error",
    ]),
    ("addresses: ftp, link-local, passwords, a redirect to a file", [
        INPUTS + "test_a_bad_yaml_is_refused", FAULTS + "test_a_redirection_to_a_local_file_is_refused",
        FAULTS + "test_https_is_not_left_for_http",
        "paddle/download/test_download_layout::test_secrets_in_addresses_are_not_shown",
    ]),
    ("servers: short, long, endless and stalled bodies, no ranges, 416, 429 and 503 forever", [
        FAULTS + "test_a_server_that_drops_always_is_given_up_with_the_part_kept_for_the_next_run",
        FAULTS + "test_a_stalled_server_counts_as_a_dropped_connection",
        FAULTS + "test_a_server_without_ranges_starts_again", FAULTS + "test_a_busy_server_is_asked_again",
        INPUTS + "test_a_file_without_an_end_stops_before_the_disk_is_full",
        INPUTS + "test_ranges_that_are_never_satisfiable_end",
    ]),
    ("a file that changes between two ranges", [FAULTS + "test_a_part_of_another_version_is_not_continued"]),
    ("a length that does not match the file", [FAULTS + "test_a_wrong_sum_is_fetched_again_once"]),
    ("tars: `..`, absolute, links, devices, setuid, huge; a zip", [
        TARS + "test_an_evil_tar_is_refused_whole", TARS + "test_owners_and_set_id_bits_of_a_tar_are_not_taken_over",
        INPUTS + "test_a_member_that_says_it_has_a_petabyte_is_refused",
        INPUTS + "test_a_zip_is_data_and_is_not_unpacked",
    ]),
    ("a target that is full or cannot be written, two downloaders at once", [
        "paddle/download/test_download_layout::test_a_disk_without_room_is_refused_before_the_first_file",
        "paddle/download/test_download_node::test_a_folder_that_cannot_be_written_is_refused",
        "paddle/download/test_download_node::test_four_workers_download_once",
    ]),
    ("one bit flipped in each kind of file", [
        SAFETY + "test_every_flipped_bit_is_found_before_the_model_is_touched",
        "test_chaos::test_a_training_survives_kills_and_damage_bit_for_bit",
    ]),
    ("a file shortened by a byte, or to nothing", [SAFETY + "test_every_missing_or_shortened_file_is_named"]),
    ("a missing file", [SAFETY + "test_every_missing_or_shortened_file_is_named"]),
    ("files swapped between ranks or steps", [
        SAFETY + "test_files_swapped_between_two_ranks_are_found_on_both",
        SAFETY + "test_files_of_another_step_are_found",
    ]),
    ("a manifest with `../`, impossible shapes, types, offsets, NaN, a future version", [
        SAFETY + "test_a_manifest_that_lies_is_refused", SAFETY + "test_an_index_that_lies_is_refused",
        SAFETY + "test_a_tensor_file_that_lies_is_refused",
        SAFETY + "test_any_header_of_a_tensor_file_gives_a_result_or_our_error", SAFETY + "test_odd_json_is_refused",
    ]),
    ("a pickle with our name, code in a `.pt`", [SAFETY + "test_a_pickle_in_place_of_a_file_runs_no_code"]),
    ("a checkpoint of another model, name or type", [
        SAFETY + "test_a_checkpoint_of_another_model_or_type_is_refused",
        "engine/test_checkpoint_objects::test_the_state_of_another_optimizer_is_refused_and_nothing_changes",
        "engine/test_checkpoint_objects::test_the_state_of_another_scheduler_is_refused_and_the_model_stays",
    ]),
    ("a checkpoint saved by four ranks, loaded by another number", [
        "engine/test_checkpoint::test_from_four_ranks_to_two_and_back",
    ]),
    ("folders that belong to others, world-writable folders, links that lead outside", [
        SAFETY + "test_links_and_folders_that_anyone_can_write_are_refused",
        "engine/test_checkpoints_kept::test_strange_things_in_the_root_are_left_alone",
    ]),
    ("NaN, Inf and 1e38 in a sample, an empty batch, a label out of range, a rank without data", [
        NUMBERS + "test_the_same_update_is_skipped_on_all_ranks_and_the_rank_is_named",
        NUMBERS + "test_a_sample_of_1e38_trains_like_plain_pytorch_or_is_skipped",
        NUMBERS + "test_a_label_out_of_range_is_torch_s_own_error",
        NUMBERS + "test_a_rank_without_data_is_named_by_join",
    ]),
    ("a rank with another seed, rate, batch, strategy or torch", [
        "fleet/test_agreement::test_different_strategies_name_ranks_and_keys",
        "fleet/test_agreement::test_ranks_that_build_different_models_or_optimizers_are_named",
        NUMBERS + "test_another_version_of_torch_is_named",
    ]),
    ("impossible values of WORLD_SIZE, RANK, ports and addresses", [
        "comm/test_roles::test_a_broken_environment_is_refused_by_variable_and_value",
        "comm/test_world::test_an_address_that_does_not_resolve_is_named",
        "launch/test_launch_options::test_any_command_line_gives_a_job_or_a_one_line_error",
        "launch/test_launch_nodes::test_a_port_in_use_is_an_error",
    ]),
    ("junk, slow, replayed and wrong-secret frames", [
        "launch/test_launch_frames::test_junk_is_never_accepted",
        "launch/test_launch_frames::test_a_replayed_session_changes_nothing",
        "launch/test_launch_frames::test_a_node_with_another_secret_is_told_so_and_so_is_node_0",
        "launch/test_launch_frames::test_a_connection_that_does_not_finish_its_handshake_is_closed",
    ]),
    ("scripts that end early, fork, ignore SIGTERM, close stdout, print binary", [
        "launch/test_launch_odd_scripts::test_the_end_is_the_right_one",
        "launch/test_launch_odd_scripts::test_binary_output_is_kept_as_it_is",
    ]),
    ("names with `<script>` in the HTML of `fleetx verify` and `fleetx report`", [
        "verify/test_verify::test_what_is_shown_in_html_is_never_part_of_it",
        "report/test_report::test_what_a_record_says_is_escaped",
        "report/test_browser::test_what_a_record_says_runs_nothing",
    ]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(1, 31))
def test_each_of_the_thirty_has_tests_that_exist(number):
    what, tests = TABLE[number - 1]
    assert what
    assert tests
    for test in tests:
        file, name = test.split("::")
        tree = ast.parse((TESTS / f"{file}.py").read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], test


def page() -> str:
    rows = ["| | input | tests |", "| --- | --- | --- |"]
    for number, (what, tests) in enumerate(TABLE, 1):
        rows.append(f"| {number} | {what} | {'<br>'.join(f'`{test}`' for test in tests)} |")
    return (
        "# Thirty bad inputs\n\nEach either raises one clear error or is harmless, and nothing is written "
        "elsewhere. The tests are in `tests/`.\n`tests/test_bad_inputs.py` writes and checks this page.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def test_the_page_is_this_table():
    assert len(TABLE) == 30
    assert PAGE.read_text() == page(), "run python tests/test_bad_inputs.py"


if __name__ == "__main__":
    PAGE.write_text(page())
