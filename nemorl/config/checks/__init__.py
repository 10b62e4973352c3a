"""What must hold between the fields of an experiment, beyond the type of each.

A check is a function that takes the sections it looks at, by their names in `Experiment`, and yields what is
wrong. It is made when all of these sections are sound. Checks look at nothing outside the configuration; what
needs the model or the machine is in `nemorl.plan.problems`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping

from nemorl.errors import Violation

from . import (
    advantages,
    batches,
    data,
    engines,
    exchange,
    filters,
    groups,
    lengths,
    losses,
    megatron_generation,
    nodes,
    offline,
    resources,
    rewards,
    sampling,
    schedule,
    servers,
    trtllm,
    validation,
)

Check = Callable[..., Iterator[Violation]]

CHECKS: tuple[Check, ...] = (
    batches.no_staleness_yet,
    batches.minibatches_divide,
    batches.data_parallel_divides,
    batches.interleaved_stages_have_work,
    advantages.groups_can_be_compared,
    advantages.advantage_settings_are_used,
    advantages.passing_sets_differ,
    advantages.rewards_to_decouple,
    advantages.turns_to_compare,
    advantages.divergence_reaches_advantages,
    filters.filters_have_something_to_do,
    filters.groups_can_vary,
    filters.filtered_reward_is_paid,
    batches.aggregation_has_its_length,
    losses.divergence_has_a_gradient,
    losses.divergence_settings_are_used,
    losses.loss_can_act,
    losses.loss_fits_the_advantage,
    losses.likelihood_settings_are_used,
    losses.entropy_settings_agree,
    losses.correction_has_bounds,
    losses.correction_fits_the_loss,
    losses.divisor_differs,
    lengths.turn_fits_sequence,
    lengths.cache_holds_sequence,
    lengths.micro_batch_holds_sequence,
    exchange.changes_are_few,
    exchange.changes_have_a_base,
    exchange.files_hold_whole_versions,
    exchange.nccl_wants_gpus,
    exchange.cuda_ipc_is_for_gpus_of_one_machine,
    offline.data_can_be_learnt,
    offline.head_suits_algorithm,
    offline.micro_batch_holds_pair,
    offline.preference_settings_are_used,
    offline.preferences_teach,
    offline.validation_settings_are_used,
    sampling.training_explores,
    sampling.training_is_unfiltered,
    sampling.greedy_samples_once,
    schedule.decay_follows_warmup,
    schedule.decay_goes_down,
    data.template_holds_prompt,
    data.chat_parts_want_chat,
    data.arithmetic_has_enough_pairs,
    data.slips_are_wrong,
    data.answers_to_learn,
    data.answers_to_compare,
    data.reasoning_gym_belongs_together,
    data.chained_sums_begin_with_one,
    data.validation_shares_no_task,
    rewards.something_is_rewarded,
    rewards.reward_names_differ,
    rewards.reward_addresses_are_whole,
    rewards.judges_can_be_understood,
    rewards.calculator_wants_chat,
    validation.data_to_validate_on,
    validation.enough_tasks,
    validation.pass_at_k_has_samples,
    validation.cons_at_k_has_samples,
    validation.sets_are_sampled,
    validation.best_checkpoint_is_measured,
    validation.early_stop_is_measured,
    validation.checkpoints_are_written,
    validation.saved_weights_come_from_a_checkpoint,
    servers.samples_can_be_learnt,
    servers.servers_are_used_as_they_are,
    servers.server_address_is_whole,
    servers.endpoint_has_a_key,
    servers.servers_are_reached_from_all_nodes,
    nodes.labels_name_groups,
    nodes.domains_are_labels,
    resources.kernels_want_gpus,
    resources.narrow_optimizer_has_its_kernel,
    resources.offload_wants_generation,
    resources.gpus_for_all_processes,
    groups.critic_is_wanted,
    groups.reference_is_wanted,
    groups.teachers_are_wanted,
    groups.teachers_can_be_asked,
    groups.critic_settings_are_used,
    groups.groups_have_devices,
    groups.groups_are_as_sound_as_policies,
    groups.reward_models_are_asked_while_sampling,
    megatron_generation.policy_can_sample,
    megatron_generation.policy_samples_as_it_is,
    trtllm.trtllm_wants_gpus,
    trtllm.trtllm_step_holds_prompt,
    trtllm.trtllm_experts_fit,
    trtllm.trtllm_updates_in_flight,
    trtllm.trtllm_arguments_are_free,
    engines.vllm_arguments_are_free,
    engines.vllm_stages_want_gpus,
    engines.vllm_reads_prompts_whole,
    engines.vllm_quantises_by_reload,
    engines.vllm_computes_adapters,
    engines.vllm_takes_turns,
    engines.vllm_shares_gpus,
    engines.vllm_quantises_on_gpus,
)


def check_sections(sections: Mapping[str, object]) -> list[Violation]:
    """Make every check whose sections are all there."""
    found: list[Violation] = []
    for check in CHECKS:
        wanted = inspect.signature(check).parameters
        if wanted.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in wanted})
    return found
