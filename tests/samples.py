"""What `make test` keeps of the grids whose cases are long: the rest is run by `make sweep`.

A row is a test below its file. A number: as many cases, the first, the last and those between them that show most values of the
parameters (``tests.sampled.spread``). 0: none, where a smaller test holds the fact. Texts: the cases whose names contain one.
Refusals stay whole, and planted bugs that are found in a tenth of a second.
"""

from tests.sampled import samples

SAMPLES = samples("""
tests/bench/harness/test_bench.py
    test_the_protocol_says_whether_neighbours_are_balanced 1
tests/bench/models/test_workload.py
    test_a_random_cache_may_be_longer_than_the_model_s_positions 0
    test_torch_compile_traces_a_layer_whole "all options"
    test_published_models_with_tiny_sizes_run_and_are_checked "drop_bias"
    test_experts_in_another_layout_are_checked_and_named 0
    test_a_cache_over_the_ranks_is_checked_against_the_baseline "prefill"
    test_weights_in_fp8_are_checked_and_named 1
    test_layers_are_checked_in_both_modes 1
    test_a_wrong_model_is_caught 1
tests/bench/ops/test_problem.py
    test_weights_are_cold_again_when_they_come_round 1
tests/bench/regret/test_regret.py
    test_every_shape_plans_without_a_row_and_every_legal_design_is_named 13
tests/bench/test_command.py
    test_every_op_runs_checks_and_reports 6
tests/benchmarks/providers/test_moe.py
    test_every_baseline_gives_the_answer 10
tests/benchmarks/providers/test_tiles.py
    test_answers 2
tests/benchmarks/test_performance.py
    test_pages_are_written_from_the_results 0
tests/check/test_check.py
    test_every_strategy_finds_a_race 2
    test_a_schedule_is_a_function_of_its_seed 1
tests/check/test_one_value.py
    test_a_count_that_nobody_takes_past_the_value_is_clean_and_one_more_is_a_finding 4
    test_barriers_locks_and_counts_of_raw_loops 4
tests/check/test_ops.py
    test_promises_of_teams_and_primitives_hold_under_check 5
    test_whole_fused_steps_are_clean "gemm_ar"
    test_an_op_is_clean 15
tests/check/test_overlap.py
    test_a_decoding_step_relies_on_no_kernel_before_it_has_followed_it "1"
tests/check/test_relaxed_order.py
    test_what_an_acquire_would_not_have_ordered_is_no_fault_of_a_relaxed_access 4
tests/check/test_torch_nvshmem.py
    test_a_signal_orders_a_put_only_after_a_fence "-2]"
tests/check/test_torch_programs.py
    test_streams_and_events_order_copies 3
    test_a_program_runs_as_it_stands 1
tests/costs/test_recipes.py
    test_published_models_split_prompts_and_not_decode_steps "h200"
tests/engine/test_engine.py
    test_after_a_step_that_fails_all_requests_go_on_without_a_gap 3
    test_a_stream_that_is_closed_leaves_nothing_behind 8
    test_padded_passes_give_the_tokens_of_those_as_they_are 0
    test_a_fused_step_of_a_large_bucket_gives_the_tokens_of_the_unfused_form 0
    test_slots_chunks_and_preemption_do_not_change_an_answer 2
    test_tokens_are_the_same_on_every_rank_and_for_every_world_size "greedy"
    test_fused_kernels_give_the_tokens_of_the_unfused_forms 1
    test_the_built_in_model_adds_in_every_mode 1
tests/engine/test_faults.py
    test_rows_without_a_token_to_choose_are_told_apart_in_every_kind 1
    test_logits_that_are_not_finite_end_their_answer_alone 1
tests/engine/test_hidden_drafts.py
    test_drafts_are_those_of_a_plain_head 1
    test_all_ranks_and_recipes_draft_alike 0
    test_drafts_are_those_of_an_mtp_layer_of_transformers 1
    test_mtp_heads_of_mixtures_of_experts 1
tests/engine/test_hidden_drafts_in_engine.py
    test_a_planted_bug_is_found 4
    test_other_layouts_of_eagle3_checkpoints 2
    test_cancelled_requests_leave_the_drafts_of_the_rest 1
    test_prompts_find_rows_of_the_head_with_the_models_pages 1
    test_features_of_requests 2
    test_adaptive_lengths_and_windows 0
    test_chunks_slots_and_preemption_draft_alike 1
tests/engine/test_pooling.py
    test_all_ways_to_read_a_prompt_give_its_vectors "chunks" | "stages"
tests/engine/test_prefix_caching.py
    test_answers_are_those_without_it 1
tests/engine/test_processes.py
    test_signals_to_all_forks_of_the_parent_and_a_rank_that_is_stopped 0
    test_a_rank_that_is_killed_is_told_at_once_also_while_the_other_hangs 1
tests/engine/test_quantized_engine.py
    # Each format once.
    test_built_in_models_add "adder-fp8_per" | "adder-int4" | "adder-moe-fp8-" | "adder-moe-mxfp4"
tests/engine/test_runner.py
    test_prompts_of_a_spread_cache_are_read_as_they_are 1
    test_empty_slots_of_a_bucket_change_nothing 1
    test_padded_prompts_are_read_as_they_are 1
    test_ragged_prompts_are_read_as_they_are 1
tests/engine/test_same_bits.py
    test_rows_have_the_same_bits_at_every_world_size_and_beside_any_rows 1
tests/engine/test_sampling.py
    test_the_kept_tokens_are_those_of_sorting 3
    test_fused_kernels_choose_what_torch_does 3
    test_truncated_draws_are_alike_over_the_ranks_and_in_a_mixed_batch 1
tests/engine/test_speculative.py
    test_windows_beside_drafts 1
    test_a_synthetic_acceptance_gives_the_stated_tokens_a_step 1
    test_a_model_as_its_own_draft_has_all_drafts_accepted 1
    test_a_seed_gives_the_same_answer_with_and_without_drafts 1
    test_slots_chunks_and_preemption_beside_drafts 4
    test_features_of_requests_beside_drafts_that_are_accepted 5
    test_kernels_and_recipes_verify_drafts 1
tests/engine/test_speculative_sampling.py
    test_sampled_tokens_have_the_distribution_of_the_model 1
    test_a_wrong_rule_of_acceptance_is_seen 1
tests/integrations/test_torch.py
    test_styles_give_the_results_and_gradients_of_torch_s 2
tests/kernels/test_fp8_rows.py
    test_the_cases_catch_a_planted_mistake "the group before" | "scales transposed" | "scales of heads one token off" |
        "of a row" | "first group"
tests/language/test_amd.py
    test_whole_kernels_release_and_poll_at_system_scope 1
tests/language/test_grid_barrier.py
    test_grids_of_any_size_share_a_counter 1
    test_all_threads_stores_are_released_and_all_threads_acquire 2
tests/language/test_lowering.py
    test_every_primitive_compiles 1
tests/language/test_primitives_page.py
    test_an_example_is_right_free_of_races_and_compiles 3
tests/language/test_shmem.py
    test_waits_for_any_skip_what_status_marks 1
    test_signals_of_64_bits_are_sent_and_awaited_whole 2
    test_a_wait_for_one_value_is_a_loop_on_the_whole_signal 3
    test_every_strategy_finds_a_wait_that_may_miss_its_value 3
    test_a_wait_for_one_value_that_is_answered_is_clean 1
tests/language/test_signals.py
    test_compiler_and_simulator_refuse_the_same_misuse_in_one_line 20
    test_notifies_count_past_the_sign_bit 2
    test_nothing_but_an_integer_of_32_or_64_bits_is_a_signal 3
    test_a_wait_is_a_loop_on_a_signed_difference 10
    test_a_notify_stores_the_signal_s_width_and_amd_compiles_both 2
tests/language/test_waits.py
    test_waits_for_several_signals_load_them_in_one_step_and_acquire 1
tests/layers/test_attention_options.py
    test_all_options_in_kernels 1
    test_an_option_is_its_equation 7
    test_all_options_over_ranks 2
    test_an_option_in_sequences 7
tests/layers/test_foreign.py
    test_a_replaced_model_answers_as_the_untouched_one 1
tests/layers/test_from_module.py
    test_attention_that_is_the_same_gives_the_same 7
tests/layers/test_layers.py
    test_an_mlp_over_ranks_is_the_whole_mlp 1
    test_an_mlp_of_many_tokens_takes_them_as_they_arrive 1
    test_attention_over_ranks_is_the_whole_attention 1
    test_a_step_from_the_cache_is_the_last_row_of_the_prompt 2
tests/layers/test_moe.py
    test_groups_of_ranks_with_slices_of_their_experts_are_the_whole_mixture 0
    test_routing_like_deepseek_s_is_that_of_a_loop 1
    test_a_mixture_over_ranks_is_the_whole_one 1
    test_a_shared_expert_over_ranks_is_the_whole_one 0
    test_a_mistake_is_seen 2
    # Gradients in the other recipe are those of test_moe_backward.py.
    test_two_steps_of_sgd_are_those_of_the_whole_layer "slices0"
tests/layers/test_moe_options.py
    test_a_mixture_over_ranks_is_that_of_transformers 1
tests/layers/test_sequences.py
    test_layers_of_sequences_are_the_whole_layers 2
tests/models/test_adapters.py
    test_an_engine_mixes_adapters_and_shares_pages_only_among_requests_of_one 1
    test_rows_with_adapters_are_those_of_merged_weights 9
tests/models/test_block_options.py
    test_a_config_means_what_it_means_to_transformers 10
    test_an_engine_answers_as_transformers_does 1
    test_bfloat16_rounds_as_transformers_does 2
tests/models/test_builtin.py
    test_the_model_adds_sums_it_has_not_seen 2
tests/models/test_context_parallel.py
    test_kernels_over_a_spread_cache_agree_with_transformers 0
    test_prompts_that_go_on_over_a_spread_cache_are_computed_in_parts 0
    test_new_prompts_by_torch_s_attention_take_a_rank_s_own_heads 0
    test_logits_are_those_of_transformers 1
    test_an_engine_answers_as_one_rank_does 1
tests/models/test_expert_options.py
    test_an_engine_answers_as_transformers_does 1
tests/models/test_families.py
    # Windows, sinks and latents over kernels are held by tests of layers and by test_latent.py.
    test_the_recipes_agree_over_simulated_kernels "qwen3-next-2"
    # Each family once, and one of its variants where that is another mechanism.
    test_the_recipes_agree_with_transformers "llama-3-2" | "qwen2.5-4" | "mistral" | "qwen3-yarn" | "seed-oss" |
        "qwen3-moe-mixed" | "mixtral" | "qwen2-moe-2" | "olmo2-3" | "olmo3" | "granite-" | "gemma2" | "gemma3" |
        "smollm3-2" | "phi3-long" | "glm4-8" | "ernie4.5-2" | "exaone4-4" | "qwen3-next-2" | "qwen3.5-moe" | "olmoe" |
        "granitemoe" | "glm4-moe-2" | "minimax-m2-3" | "ernie4.5-moe-3" | "dots1-3" | "exaone-moe-2" | "gpt-oss-3" |
        "deepseek-v3" | "ministral3-3" | "glm4-moe-lite-2" | "hunyuan-2" | "arcee-3" | "gemma-2" | "glm-4-" | "helium" |
        "cwm" | "ministral-4" | "hyperclovax" | "flex-olmo" | "solar-open" | "youtu-3" | "vaultgemma-4" | "apertus-4" |
        "hunyuan-moe-3"
    test_logits_and_64_greedy_tokens_are_those_of_transformers "qwen3-next"
    test_of_the_test_a_mutant_is_far_beyond_the_tolerance 16
tests/models/test_family.py
    test_a_config_means_what_it_means_to_transformers 18
tests/models/test_four_bit_models.py
    test_every_format_is_its_plain_model 2
    test_mixtures_are_the_plain_model 1
    test_dequantized_weights_are_bit_for_bit_those_of_one_rank 4
    test_rows_of_16_bits_go_to_kernels_that_read_4_bits 0
    test_the_recipes_are_the_plain_model 1
tests/models/test_fp8_delta_nets.py
    test_logits_are_those_of_bytes_times_scales 1
tests/models/test_fp8_models.py
    test_every_format_is_its_plain_model 2
    test_the_recipes_are_the_plain_model_over_simulated_kernels 0
    test_the_recipes_are_the_plain_model 1
    test_mixtures_are_the_plain_model 1
    test_experts_made_fp8_at_load_are_the_plain_model 1
    test_experts_of_16_bit_rows_go_to_kernels_that_take_fp8_weights 1
    test_rows_of_16_bits_go_to_kernels_that_take_fp8_weights 0
    test_dequantized_weights_are_bit_for_bit_those_of_one_rank 3
tests/models/test_joined.py
    test_a_joined_tensor_is_read_as_its_parts_are 2
tests/models/test_latent.py
    test_kernels_attend_to_latents_of_all_ranks 0
    test_engines_answer_as_transformers_does 1
    test_engines_answer_the_same_by_kernels 1
tests/models/test_mtp_of_delta_nets.py
    test_drafts_are_those_of_plain_torch 2
tests/models/test_multimodal.py
    test_the_text_model_of_a_multimodal_checkpoint_is_that_of_transformers 2
tests/models/test_mxfp4_experts.py
    test_answers_by_weft_s_kernels_alone_are_those_of_transformers 0
    test_answers_are_those_of_transformers 1
tests/models/test_official_configs.py
    test_a_published_config_means_what_it_means_to_transformers 30
tests/models/test_over_stages.py
    test_stages_answer_as_one_rank 1
tests/models/test_quantization.py
    test_weights_made_fp8_at_load_are_those_of_the_whole_model 1
tests/models/test_qwen3.py
    test_deferred_rms_scales_are_as_near_to_fp32_as_the_others 0
    test_logits_and_64_greedy_tokens_are_those_of_transformers 1
    test_the_modes_agree_with_transformers_over_simulated_kernels 1
    test_the_modes_agree_with_transformers_whatever_has_to_be_padded 2
tests/models/test_stacked_experts.py
    test_stacked_experts_are_quantized_as_they_are_read 2
tests/models/test_state_snapshots.py
    test_few_places_chunks_and_preemption 2
tests/models/test_states.py
    test_answers_are_those_of_transformers 1
tests/models/test_states_gpu.py
    test_answers_are_the_same_on_virtual_ranks 0
tests/models/test_states_in_graphs.py
    test_padded_prompts_leave_the_states_of_their_tokens "(20, 1, 9)"
tests/models/test_states_of_drafts.py
    test_recipes_verify_drafts 1
    test_features_of_requests 1
    test_drafts_change_no_answer 2
tests/models/test_steps_in_flight.py
    test_groups_in_flight_get_the_tokens_of_one_rank 1
tests/models/test_windows.py
    test_answers_need_the_pages_of_their_windows 1
tests/ops/attention/test_decode_attention.py
    test_what_orders_the_new_token_is_needed 3
    test_equals_the_two_ops_that_it_fuses 3
tests/ops/attention/test_fixed_runs.py
    test_rows_have_the_same_bits_however_they_are_computed 2
    test_all_calls_multiply_by_one_shape_of_instruction_on_sm_90 1
tests/ops/attention/test_gathered_prefill_attention.py
    test_a_planted_bug_between_copies_is_found 1
tests/ops/attention/test_mla.py
    test_the_attention_compiles_and_fits_without_a_stack 1
tests/ops/attention/test_options.py
    test_a_mutant_is_caught 10
tests/ops/attention/test_paged_attention.py
    test_what_orders_the_partials_is_needed 4
    test_mistakes_with_several_new_tokens_are_found 3
    test_arrival_counters_are_left_as_zeros_and_calls_repeat 2
tests/ops/attention/test_paged_prefill_attention.py
    test_each_range_is_as_exact_as_its_keys_allow 2
tests/ops/attention/test_qk_norm_rope.py
    test_other_cells_stay_and_values_are_only_rounded 24
tests/ops/collectives/test_collective.py
    test_mixed_sizes_back_to_back 1
tests/ops/collectives/test_compile_collectives.py
    test_compiles 3
    test_rows_in_fp8_come_of_the_sums_of_16_bits 1
    test_no_warp_clears_a_key_that_another_still_loads 1
    test_compiles_for_world_size 2
    test_ragged_and_tiny_sizes_compile "1001-one_shot"
tests/ops/collectives/test_copy_engine.py
    test_rounds_are_clean_under_many_schedules 0
    test_both_designs_in_turn 1
tests/ops/collectives/test_tree_norm.py
    test_it_has_the_bits_of_two_launches_on_any_number_of_ranks "1-shapes0" | "4-shapes2" | "8-shapes3"
tests/ops/gemm/test_activations.py
    test_compiles_and_fits 1
tests/ops/gemm/test_matmul_deferred_norm.py
    test_an_all_reduce_adds_up_the_parts_of_a_product 0
    test_every_design_divides_its_rows 2
    test_parts_add_up_to_the_product 1
    test_what_an_op_is_called_with 3
    test_an_all_reduce_and_the_product_behind_it 1
tests/ops/gemm/test_matmul_four_bit.py
    test_compiles_without_a_graph_break 0
    test_on_sm_90_without_spills_with_the_weight_in_registers 1
    test_ops_of_any_shape 3
    test_every_format_by_every_design 5
    test_the_cases_catch_a_planted_mistake 3
tests/ops/gemm/test_matmul_fp8.py
    test_on_sm_90_without_spills_by_fp8_instructions 1
    test_ops_of_any_shape 1
    test_every_form_of_scales_in_the_kernel 3
    test_the_cases_catch_a_planted_mistake 2
tests/ops/gemm/test_sliced.py
    test_bits_of_a_row_depend_on_no_tile_and_no_other_row "4-True" | "2-False"
tests/ops/gemm/test_small_m.py
    test_ragged_shapes 3
    test_what_an_op_is_called_with 2
tests/ops/linear_attention/test_compile_linear_attention.py
    test_compiles_and_fits 4
    test_no_thread_has_a_stack 8
    test_steps_with_drafts_fit 2
    test_steps_with_drafts_spill_few_registers 1
tests/ops/linear_attention/test_linear_attention.py
    test_a_prompt_in_two_pieces_is_a_prompt_in_one 2
    test_a_planted_mistake_is_found 5
tests/ops/moe/test_four_bit_experts.py
    test_few_and_many_pairs 0
    test_compiles_and_on_sm_90_without_spills_with_the_weight_in_registers 1
tests/ops/moe/test_fp8_experts.py
    test_compiles_without_a_graph_break 0
    test_on_sm_90_by_fp8_instructions_from_shared_memory 1
    test_experts_of_any_shape_are_the_dequantized_product 1
    test_rows_written_in_fp8_are_the_quantized_ones 1
    test_the_cases_catch_a_planted_mistake 3
    test_a_planted_mistake_in_what_is_written_is_caught 1
tests/ops/moe/test_fp8_rows.py
    test_grouped_gemms_of_fp8_rows_compile_and_fit 1
    test_kernels_that_send_fp8_compile 1
tests/ops/moe/test_grouped_matmul_all_reduce_rms_norm.py
    test_a_mistake_is_seen 3
tests/ops/moe/test_matmul_route_schedule.py
    test_no_program_reads_a_part_too_early 1
    test_the_cases_catch_a_planted_mistake 4
    test_the_cases_catch_a_planted_mistake_in_sums_of_parts 1
    test_it_compiles_and_fits 2
tests/ops/moe/test_moe_backward.py
    test_gradients_of_experts_whose_slices_two_ranks_hold_are_those_of_one_model 0
    test_gradients_over_ranks_are_those_of_one_model 1
tests/ops/moe/test_moe_exchange.py
    test_the_check_finds_a_planted_bug 1
    test_experts_shared_by_ranks_give_the_same_bits_by_every_algorithm_and_schedule 0
    test_a_layer_over_ranks_is_the_whole_one_in_every_call 1
    test_the_kernel_that_rounds_and_sends_rows_compiles 1
    test_one_half_is_enough 0
    test_kernels_of_words_compile 1
    test_a_wrong_owner_is_seen 1
tests/ops/moe/test_moe_ops.py
    test_a_layer_s_gradients_are_torch_s 1
    test_every_schedule_gives_the_same_bits 0
    test_grouped_gemms_with_biases_compile_and_fit 1
    test_grouped_gemms_compile_and_fit 1
    test_the_cases_catch_a_planted_mistake 5
    test_the_grouped_cases_catch_a_planted_mistake 4
    test_kernels_of_one_rank_compile 3
    test_grouped_gemms_on_sm_90_use_its_hardware_and_no_stack 1
tests/ops/overlap/test_backward.py
    test_the_check_sees_a_backward_that_does_not_wait_for_the_gather 1
tests/ops/overlap/test_compile_overlap.py
    test_own_rows_first_on_sm_90 0
    test_compiles_and_fits 1
    test_machine_code_on_sm_90 1
    test_nothing_is_spilled_where_rows_were_tuned 0
    test_other_dtypes_and_world_sizes_compile 0
    test_pointer_loads_on_sm_90_keep_the_accumulator_in_registers 1
tests/ops/overlap/test_fp8.py
    test_compiles_without_a_graph_break 0
    test_every_case_on_slow_ranks 2
    test_against_plain_torch 1
    test_over_nodes 0
    test_a_planted_mistake_is_caught 4
tests/ops/overlap/test_matmul_all_reduce.py
    test_one_buffer_serves_call_after_call_where_two_are_too_large 1
tests/ops/overlap/test_overlap.py
    test_mixed_shapes_back_to_back 1
    test_compiles_without_a_graph_break 1
tests/ops/test_cases.py
    test_every_case 24
tests/ops/test_compile_layer_kernels.py
    test_heads_of_256_multiply_keys_by_queries "decode_attention_gated-6-sm_90"
    test_machine_code_on_sm_90 1
    test_options_compile_and_fit_a_gpu_of_the_other_maker 1
    test_other_heads_compile_and_fit 1
    test_as_many_programs_of_attention_fit_an_sm_90_as_are_counted_on 1
    test_rows_in_fp8_come_of_the_sums_of_16_bits 0
    test_fp8_results_compile_and_fit_a_gpu_of_the_other_maker 1
    # The three tests above of other heads, options and fp8 compile for gfx942.
    test_compiles_and_fits "sm_90-paged_attention_whole" | "sm_80-add_rms_norm"
tests/ops/test_layer_kernels.py
    test_compiles_without_a_graph_break 1
tests/ops/vocab/test_compile_vocab.py
    test_compiles 11
    test_machine_code_on_sm_90 "adjust_logits" | "note_tokens" | "top_p" | "sample"
tests/ops/vocab/test_sample_argmax.py
    test_a_floor_excludes_lesser_logits 6
tests/ops/overlap/test_pipelined.py
    test_replayed_calls_fill_the_same_half_each_time 4
tests/parallel/test_context.py
    test_gathered_pages_hold_all_tokens_of_the_window 8
tests/parallel/test_fused_attention.py
    test_fused_attention_is_that_of_torch "bias-at once" | "sinks-at once" | "all-in chunks" | "norms after-in chunks"
    test_prompts_that_go_on_are_computed_in_parts 3
tests/parallel/test_invariant.py
    test_one_hop_and_two_add_the_same_tree 2
    test_a_row_parallel_gemm_has_the_same_bits_on_any_number_of_ranks_and_rows 2
    test_experts_have_the_same_bits_on_any_number_of_ranks_and_rows 1
tests/parallel/test_launches.py
    test_no_operation_of_torch_applies_a_scale "65-True-silu" | "3-True-silu"
    test_launches_of_a_gated_delta_net_in_fp8 "h200"
    test_launches_of_experts_in_a_layer 2
    test_launches_of_a_layer_in_fp8 1
    test_launches_of_a_layer "replicated-torch.bfloat16"
    test_launches_of_experts_in_fp8_beside_those_of_16_bits 1
tests/parallel/test_mixture.py
    test_experts_in_fp8_take_rows_in_fp8 2
    test_rows_go_to_all_ranks_where_most_of_them_need_each 2
tests/parallel/test_vocabulary.py
    test_a_split_embedding_looks_up_every_token_id 6
tests/runtime/test_launch.py
    test_a_rank_that_ends_leaves_no_semaphore_behind 0
tests/serve/test_tools.py
    # A named function is called in test_a_loop_of_five_steps_ends_by_the_answer.
    test_a_forced_call_parses_by_its_schema_whole_and_as_a_stream "required"
tests/simulator/test_interpreter.py
    test_matmul 1
    test_casts 24
tests/simulator/test_launching.py
    test_a_view_is_known_however_it_is_passed 1
tests/simulator/test_simulate.py
    test_a_push_all_gather_gives_every_rank_everything 2
    test_teams_and_primitives_do_what_they_promise 8
tests/test_commands.py
    test_a_command_runs 16
tests/tiles/test_check_tiles.py
    test_calls_in_a_row_are_clean 1
tests/tiles/test_compile_tiles.py
    test_a_wide_gemm_tile_on_sm_90 1
tests/tiles/test_exchange.py
    test_sums_over_the_ranks 1
    test_only_the_tiles_of_the_last_round_are_shared 2
    test_programs_share_a_tile_s_sum 1
tests/tiles/test_gather.py
    test_tiles_of_all_ranks_rows 3
tests/transport/test_copy_channel.py
    test_every_call_gets_its_own_data 3
tests/transport/test_push.py
    test_the_orders_of_sends_need_as_many_stages_as_the_proof_says 1
    test_a_launch_of_few_tiles_need_not_see_its_clearings 1
tests/transport/test_replays.py
    test_ranks_that_replay_and_ranks_that_launch_compute_the_same 2
tests/tune/test_command.py
    test_a_second_search_adds_to_the_file 0
    test_several_ops_are_searched_in_one_launch 0
    test_every_op_is_searched_and_written 2
    test_a_model_takes_the_place_of_ops 1
tests/zoo/test_zoo.py
    test_its_twin_is_clean 12
    test_a_planted_bug_is_found_with_its_cause 36
""")
