"""Every test here has the leak guard."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def guarded(leak_guard: str) -> str:
    return leak_guard


# --- which of these tests `make test` has time for

QUICK = {
    "test_building": ["test_a_replacement_learns_what_its_rank_learnt_at_the_start"],
    "test_canonical": ["test_any_number_of_ranks_ends_with_the_same_bits"],
    "test_sample_audit": ["test_kills_in_the_middle_of_epochs_leave_an_exact_journal"],
    "test_data_coordinates_jobs": ["test_a_lost_rank_of_a_data_coordinate_is_replaced"],
    "test_disks": ["test_a_master_that_cannot_write_does_not_keep_the_only_agent"],
    "test_double_faults": ["test_a_second_death_in_the_middle_of_a_recovery"],
    "test_elastic": [
        "test_a_job_starts_with_its_minimum_and_takes_in_who_comes_later",
        "test_a_node_that_leaves_or_dies_is_missed_for_a_moment_only",
        "test_an_agent_without_the_token_is_refused_and_changes_nothing",
        "test_an_id_belongs_to_one_life_and_to_the_next_one_when_it_is_dead",
        "test_strangers_on_the_masters_port_change_nothing",
    ],
    "test_elastic_layouts": [],
    "test_farewell": ["test_an_agent_that_comes_back_after_the_end_exits_with_the_jobs_code"],
    "test_faults": ["test_the_same_exception_at_the_same_step_twice_ends_the_job_with_restarts_left"],
    "test_flags": ["test_what_cannot_be_handed_over_is_refused"],
    "test_hosts": [
        "test_ddp_trains_across_two_hosts_which_listen_on_their_named_addresses_only",
        "test_a_node_behind_a_silent_cut_is_lost_and_comes_back_as_a_new_life",
        "test_a_host_without_the_right_token_is_turned_away_and_the_job_does_not_notice",
        "test_with_mutual_tls_only_certificates_of_the_jobs_authority_are_let_in",
    ],
    "test_journal": ["test_an_unfinished_job_goes_on_where_it_was"],
    "test_ladder": [
        "test_retry_is_for_broken_connections_and_no_more",
        "test_spares_take_the_ranks_and_others_take_their_place",
        "test_a_bug_ends_the_job_with_its_traceback",
        "test_who_hangs_is_replaced_alone_and_who_pauses_is_not",
    ],
    "test_last_holder": ["test_no_committed_step_is_repeated_when_the_last_holder_dies"],
    "test_late_device": [
        "test_a_rank_is_killed_while_the_device_is_behind_its_host",
        "test_a_worker_whose_communicator_cannot_be_freed_is_replaced",
    ],
    "test_layout_checkpoints": [],
    "test_master": [
        "test_a_master_that_is_killed_comes_back_and_workers_do_not_notice",
        "test_a_master_and_a_worker_killed_together_are_one_restart",
    ],
    "test_master_host": ["test_nodes_train_on_without_their_master_and_end_when_a_decision_is_needed"],
    "test_micro_batches": ["test_a_survivor_computes_no_finished_micro_batch_again"],
    "test_numbers": ["test_a_bad_number_is_repeated_then_skipped_and_a_flipped_bit_is_found_where_it_is"],
    "test_outputs": ["test_the_console_shows_what_the_flags_say_and_the_files_have_it_all"],
    "test_outside_of_steps": [
        "test_what_is_tracked_is_right_wherever_it_is_changed",
        "test_the_shipped_example_survives_a_kill_in_its_first_step",
    ],
    "test_per_rank_state": ["test_a_killed_rank_gets_its_own_back_from_its_ring_partner"],
    "test_planned": ["test_a_job_grows_and_shrinks_as_it_is_asked_to"],
    "test_preload": ["test_a_job_runs_and_recovers_whose_preloaded_module_starts_a_thread"],
    "test_reentry": ["test_it_shrinks_after_a_loss_and_grows_back"],
    "test_refused_scripts": [
        "test_what_is_not_tracked_ends_the_job_at_once",
        "test_ranks_with_different_numbers_are_no_replicas",
        "test_the_inner_module_of_a_wrapper_recovers_as_the_wrapper_does",
        "test_a_second_loop_of_steps_is_refused",
    ],
    "test_replica_hosts": ["test_a_network_that_is_cut_in_the_middle_leaves_a_whole_image_and_heals"],
    "test_replica_nodes": ["test_a_lost_node_comes_back_from_the_memory_of_another"],
    "test_restarts": [
        "test_a_job_that_recovers_within_its_restarts_succeeds",
        "test_the_variables_are_those_of_torchrun_itself",
        "test_a_helper_process_that_is_killed_costs_no_worker_and_no_restart",
    ],
    "test_scripts_of_others": ["test_a_script_prints_what_it_prints_under_torchrun"],
    "test_session_faults": [
        "test_a_kill_at_every_point_is_repaired_in_place",
        "test_a_kill_at_every_point_is_repaired_from_a_spare",
        "test_a_step_that_breaks_is_retried_by_the_same_processes",
        "test_fully_sharded_from_replicas",
    ],
    "test_signals": [
        "test_a_signal_to_the_agent_reaches_the_workers_and_becomes_the_exit_code",
        "test_nothing_outlives_an_agent_that_was_killed",
    ],
    "test_sizing": ["test_a_job_whose_samples_are_shared_out_goes_on_with_fewer_ranks"],
    "test_snapshots": [
        "test_all_workers_die_at_once_and_then_in_the_middle_of_a_copy",
        "test_checkpoints_come_when_asked_for_a_bug_leaves_one_and_a_damaged_one_is_passed_over",
    ],
    "test_stacks": ["test_an_unchanged_script_that_is_stuck_before_its_first_step_is_shown_as_it_is"],
    "test_stopped_helpers": [
        "test_a_stopped_master_is_replaced_and_no_worker_notices",
        "test_a_stopped_fork_server_is_replaced_when_it_is_needed",
        "test_an_agent_that_is_stopped_and_goes_on_restarts_no_worker",
    ],
    "test_streams": ["test_kills_in_the_middle_of_shards_change_nothing"],
    "test_worker_ends": [
        "test_the_end_of_one_worker_is_the_end_of_the_job_and_is_named",
        "test_the_culprit_of_a_broken_collective_is_the_cause_and_its_victim_is_not",
        "test_a_worker_that_hangs_at_its_end_is_shown_and_ended",
        "test_the_root_cause_is_in_the_error_file_of_the_launcher_itself",
    ],
}
"""By file, the tests that run in `make test`: the first proof of each promise. The others of these files are marked
`thorough` and run in `make thorough`. Files that are not named here run in `make test` as a whole."""


HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` has no time for."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        quick = QUICK.get(item.path.stem) if item.path.parent == HERE else None
        if quick is not None and name not in quick:
            item.add_marker(pytest.mark.thorough)
