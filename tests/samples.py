"""What `make test` keeps of the grids whose cases are long: the rest is run by `make sweep`.

A number: as many cases, the first, the last and those between them that show most values of the parameters
(``tests.sampled.spread``). 0: none. Texts: the cases whose names contain one. Planted bugs and refusals stay whole.
"""

SAMPLES: dict[str, dict[str, int | tuple[str, ...]]] = {
    "tests/bench/models/test_workload.py": {
        "test_torch_compile_traces_a_layer_whole": ("all options", "shared expert"),
        "test_published_models_with_tiny_sizes_run_and_are_checked": ("drop_bias", "neighbours_experts"),
        "test_experts_in_another_layout_are_checked_and_named": 1,
        "test_a_cache_over_the_ranks_is_checked_against_the_baseline": ("prefill", "attn"),
        "test_weights_in_fp8_are_checked_and_named": 1,
        "test_layers_are_checked_in_both_modes": 2,
    },
    "tests/bench/ops/test_problem.py": {"test_weights_are_cold_again_when_they_come_round": 1},
    "tests/bench/test_command.py": {"test_every_op_runs_checks_and_reports": 26},
    "tests/benchmarks/providers/test_tiles.py": {"test_answers": 2},
    "tests/check/test_check.py": {"test_a_schedule_is_a_function_of_its_seed": 2},
    "tests/check/test_ops.py": {"test_whole_fused_steps_are_clean": ("gemm_ar",)},
    "tests/check/test_overlap.py": {"test_a_decoding_step_relies_on_no_kernel_before_it_has_followed_it": ("1",)},
    "tests/engine/test_engine.py": {
        "test_slots_chunks_and_preemption_do_not_change_an_answer": 4,
        "test_tokens_are_the_same_on_every_rank_and_for_every_world_size": ("greedy",),
        "test_fused_kernels_give_the_tokens_of_the_unfused_forms": ("1-ag_rs", "2-gemm_ar"),
    },
    "tests/ops/attention/test_paged_attention.py": {"test_arrival_counters_are_left_as_zeros_and_calls_repeat": 3},
    "tests/ops/attention/test_paged_prefill_attention.py": {"test_each_range_is_as_exact_as_its_keys_allow": 9},
    "tests/ops/attention/test_qk_norm_rope.py": {"test_other_cells_stay_and_values_are_only_rounded": 24},
    "tests/ops/collectives/test_compile_collectives.py": {"test_rows_in_fp8_come_of_the_sums_of_16_bits": 2},
    "tests/ops/gemm/test_matmul_deferred_norm.py": {"test_every_design_divides_its_rows": 4},
    "tests/ops/gemm/test_matmul_four_bit.py": {
        "test_on_sm_90_without_spills_with_the_weight_in_registers": 4,
        "test_ops_of_any_shape": 5,
        "test_every_format_by_every_design": 8,
    },
    "tests/ops/gemm/test_matmul_fp8.py": {
        "test_on_sm_90_without_spills_by_fp8_instructions": 3,
        "test_ops_of_any_shape": 2,
        "test_every_form_of_scales_in_the_kernel": 5,
    },
    "tests/ops/gemm/test_small_m.py": {"test_ragged_shapes": 5, "test_what_an_op_is_called_with": 3},
    "tests/ops/gemm/test_small_m_rule.py": {"test_the_measured_shapes_get_what_they_got": 1},
    "tests/ops/linear_attention/test_linear_attention.py": {"test_a_prompt_in_two_pieces_is_a_prompt_in_one": 4},
    "tests/ops/moe/test_four_bit_experts.py": {
        "test_compiles_and_on_sm_90_without_spills_with_the_weight_in_registers": 3,
    },
    "tests/ops/moe/test_fp8_experts.py": {
        "test_on_sm_90_by_fp8_instructions_from_shared_memory": 4,
        "test_experts_of_any_shape_are_the_dequantized_product": 2,
        "test_rows_written_in_fp8_are_the_quantized_ones": 3,
    },
    "tests/ops/moe/test_moe_exchange.py": {
        "test_a_layer_over_ranks_is_the_whole_one_in_every_call": 2,
        "test_the_kernel_that_rounds_and_sends_rows_compiles": 1,
        "test_one_half_is_enough": 1,
    },
}
