"""Which test stands for which of the field's cases (symptoms that people met in this job with other tools)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

REPORT, CLASSIFIER = "callbacks/test_oom_report_callback.py", "memory/test_oom_classifier.py"
CLI, PARSER, RESUME = (
    "cli/test_checks_before_the_run.py",
    "cli/test_parser_refusals.py",
    "pipeline/test_resumed_runs.py",
)

CASES: dict[int, tuple[str, ...]] = {
    # is it the device's memory?
    1: (f"{REPORT}::test_cases_of_the_field",),
    2: (f"{REPORT}::test_cases_of_the_field", "memory/test_oom_report.py::TestRemedies"),
    3: (f"{REPORT}::test_case_3_and_5_every_query_raises_and_nothing_is_hidden",),
    4: (f"{CLASSIFIER}::test_where_the_text_says_nothing_free_memory_decides",),
    5: (f"{REPORT}::test_case_3_and_5_every_query_raises_and_nothing_is_hidden",),
    6: (f"{CLASSIFIER}::test_class_does_not_depend_on_free_memory",),
    7: (f"{CLASSIFIER}::test_class_does_not_depend_on_free_memory",),
    8: (f"{CLASSIFIER}::test_where_the_text_says_nothing_free_memory_decides",),
    9: (f"{CLASSIFIER}::test_class_does_not_depend_on_free_memory",),
    10: (f"{CLASSIFIER}::test_kernel_that_asks_for_too_much_shared_memory_is_known_by_type",),
    11: (f"{CLASSIFIER}::test_class_does_not_depend_on_free_memory",),
    12: (f"{CLASSIFIER}::TestPinnedMemory", "streaming/test_staging.py"),
    13: (f"{CLASSIFIER}::test_host_allocation_that_really_fails",),
    14: (
        "pipeline/test_killed_runs.py::test_a_run_that_is_killed_again_and_again_ends_as_if_undisturbed",
        "distributed/test_failures.py::test_a_run_with_a_killed_rank_goes_on_and_ends_the_same",
    ),
    15: (f"{CLASSIFIER}::test_class_does_not_depend_on_free_memory",),
    16: ("callbacks/test_callbacks_together.py::test_a_run_of_two_units_on_cpu",),
    # Hessian and numbers
    17: ("quantization/test_hessian.py::test_one_bad_activation_names_linear_and_batch",),
    18: (
        "quantization/test_gptq.py::test_one_short_sample_is_enough_to_go_on_with_a_warning",
        "quantization/test_gptq.py::test_dead_columns_are_rounded_to_nearest_and_noted",
    ),
    19: ("quantization/test_gptq.py::test_a_linear_that_no_token_reached_is_rounded_and_says_so",),
    20: (
        "quantization/test_hessian.py::test_leading_dimensions_are_tokens",
        "quantization/test_hessian.py::test_a_padded_batch_counts_its_tokens_alone",
    ),
    21: (
        "quantization/test_hessian.py::test_half_precision_accumulates_in_float32",
        "quantization/test_hessian.py::test_float16_that_overflowed_is_advised_bfloat16",
    ),
    # model structure
    22: ("pipeline/test_geometry_checks.py::test_group_that_does_not_divide",),
    23: ("streaming/test_toy_decoders.py::test_every_form_of_call_gives_the_same",),
    24: (
        "streaming/test_toy_decoders.py::test_every_form_of_call_gives_the_same",
        "streaming/test_toy_decoders.py::test_a_call_keeps_all_but_the_hidden_states",
    ),
    25: (
        "streaming/test_streamed_families.py::test_the_sliding_window_takes_part",
        "streaming/test_streamed_families.py::test_each_block_gets_its_own_mask",
    ),
    26: (
        "streaming/test_streamed_families.py::test_streaming_equals_the_whole_forward_pass",
        "export/test_export_checkpoint.py::test_plain_transformers_computes_the_quantized_model",
    ),
    27: (
        "pipeline/test_geometry_checks.py::test_fused_experts_are_refused",
        "pipeline/test_geometry_checks.py::test_attention_beside_fused_experts",
    ),
    28: (
        "streaming/test_toy_decoders.py::test_decoder_nested_beside_a_vision_tower_is_found",
        "streaming/test_toy_decoders.py::test_two_lists_of_blocks_are_listed",
    ),
    # data
    29: (
        "data/test_token_packing.py::test_a_document_of_exactly_one_row_is_enough",
        "data/test_token_packing.py::test_documents_all_shorter_than_a_row_are_packed",
        "data/test_token_packing.py::test_too_little_text_says_how_much_there_is_and_ends",
    ),
    30: ("data/test_token_packing.py::test_an_outlier_becomes_many_rows",),
    31: (
        "data/test_token_packing.py::test_a_list_of_end_tokens_means_its_first",
        "data/test_token_packing.py::test_documents_are_joined_by_the_end_token_and_cut",
    ),
    32: ("data/test_calibration_data.py::test_loaders_never_have_workers",),
    # command line and W&B
    33: (
        "cli/test_run_and_resume.py::test_the_same_command_again_does_nothing_over_and_keeps_both_configs",
        "cli/test_wandb_logging.py::test_a_resumed_run_goes_on_in_the_same_wandb_run_without_a_doubled_step",
    ),
    34: (
        f"{PARSER}::test_an_unknown_key_is_named",
        f"{PARSER}::test_an_empty_recipe_names_what_is_missing",
        "cli/test_run_and_resume.py::test_exit_statuses_of_the_script",
    ),
    35: (f"{PARSER}::test_an_impossible_value_is_refused",),
    36: (
        "cli/test_wandb_logging.py::test_without_a_key_and_a_terminal_it_fails_before_the_model_loads",
        "cli/test_wandb_logging.py::test_offline_all_blocks_are_one_run_whose_step_only_rises",
        "data/test_text_sources.py::test_no_network_is_a_clear_error_before_any_download",
    ),
    37: ("cli/test_wandb_logging.py::test_a_resumed_run_goes_on_in_the_same_wandb_run_without_a_doubled_step",),
    # save and resume
    38: (
        "pipeline/test_full_disk.py::test_a_full_disk_ends_with_a_message_and_loses_nothing",
        "cli/test_disk_and_permission.py::test_too_little_room_is_refused_with_figures_and_remedies",
        "test_space.py::test_a_full_disk_leaves_the_old_file_and_nothing_else",
    ),
    39: (
        f"{CLI}::TestWithoutTheModel",
        "cli/test_disk_and_permission.py::test_a_run_directory_in_the_model_is_refused",
        "export/test_export_folder.py::test_the_source_is_never_a_destination",
    ),
    40: (
        "streaming/test_checkpoint_reading.py::test_missing_shards_are_named",
        "streaming/test_checkpoint_reading.py::test_single_file_and_shards_hold_the_same",
    ),
    41: (
        f"{RESUME}::test_only_the_harmed_unit_is_done_again",
        "pipeline/test_damaged_files.py::test_a_harmed_file_is_made_again_or_named",
        "pipeline/test_damaged_files.py::test_no_flipped_bit_of_a_unit_goes_unnoticed",
    ),
    42: (
        "distributed/test_same_result.py::test_three_processes_share_rows_and_samples_that_do_not_divide",
        "distributed/test_failures.py::test_a_rank_out_of_memory_ends_all_and_leaves_its_report",
    ),
}


def test_there_are_forty_two() -> None:
    assert sorted(CASES) == list(range(1, 43))


@pytest.mark.parametrize("name", sorted({name for names in CASES.values() for name in names}))
def test_each_is_there(name: str) -> None:
    file, _, wanted = name.partition("::")
    body = ast.parse((TESTS / file).read_text()).body
    defined = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert wanted in defined if wanted else any(one.startswith("test_") for one in defined)
