"""What must hold between the fields of an experiment, beyond the type of each.

A check is a function that takes the sections it looks at, by their names in `Experiment`, and yields what is
wrong. It is made when all of these sections are sound. Checks look at nothing outside the configuration; what
needs the model or the machine is in `nemorl.plan.problems`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping

from nemorl.errors import Problem

from . import batches, data, engines, losses, offline, resources, rewards

Check = Callable[..., Iterator[Problem]]

CHECKS: tuple[Check, ...] = (
    batches.no_staleness_yet,
    batches.minibatches_divide,
    batches.data_parallel_divides,
    batches.interleaved_stages_have_work,
    losses.groups_can_be_compared,
    losses.advantage_settings_are_used,
    losses.passing_sets_differ,
    losses.rewards_to_decouple,
    losses.turns_to_compare,
    losses.divergence_reaches_advantages,
    losses.filters_have_something_to_do,
    losses.groups_can_vary,
    losses.filtered_reward_is_paid,
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
    batches.turn_fits_sequence,
    batches.cache_holds_sequence,
    batches.micro_batch_holds_sequence,
    resources.changes_are_few,
    resources.changes_have_a_base,
    resources.files_hold_whole_versions,
    resources.nccl_wants_gpus,
    resources.cuda_ipc_is_for_gpus_of_one_machine,
    offline.data_can_be_learnt,
    offline.head_suits_algorithm,
    offline.micro_batch_holds_pair,
    offline.preference_settings_are_used,
    offline.preferences_teach,
    offline.validation_settings_are_used,
    batches.training_explores,
    batches.training_is_unfiltered,
    batches.greedy_samples_once,
    batches.decay_follows_warmup,
    batches.decay_goes_down,
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
    data.data_to_validate_on,
    data.enough_tasks,
    data.pass_at_k_has_samples,
    data.cons_at_k_has_samples,
    data.sets_are_sampled,
    data.best_checkpoint_is_measured,
    data.early_stop_is_measured,
    data.checkpoints_are_written,
    data.saved_weights_come_from_a_checkpoint,
    engines.samples_can_be_learnt,
    engines.servers_are_used_as_they_are,
    engines.server_address_is_whole,
    engines.endpoint_has_a_key,
    engines.servers_are_reached_from_all_nodes,
    resources.labels_name_groups,
    resources.domains_are_labels,
    resources.kernels_want_gpus,
    resources.narrow_optimizer_has_its_kernel,
    resources.offload_wants_generation,
    resources.gpus_for_all_processes,
    resources.critic_is_wanted,
    resources.reference_is_wanted,
    resources.teachers_are_wanted,
    resources.teachers_can_be_asked,
    resources.critic_settings_are_used,
    resources.groups_have_devices,
    resources.groups_are_as_sound_as_policies,
    resources.reward_models_are_asked_while_sampling,
    engines.policy_can_sample,
    engines.policy_samples_as_it_is,
    engines.trtllm_wants_gpus,
    engines.trtllm_step_holds_prompt,
    engines.trtllm_experts_fit,
    engines.trtllm_updates_in_flight,
    engines.trtllm_arguments_are_free,
    engines.vllm_arguments_are_free,
    engines.vllm_stages_want_gpus,
    engines.vllm_reads_prompts_whole,
    engines.vllm_quantises_by_reload,
    engines.vllm_computes_adapters,
    engines.vllm_takes_turns,
    engines.vllm_shares_gpus,
    engines.vllm_quantises_on_gpus,
)


def check_sections(sections: Mapping[str, object]) -> list[Problem]:
    """Make every check whose sections are all there."""
    found: list[Problem] = []
    for check in CHECKS:
        wanted = inspect.signature(check).parameters
        if wanted.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in wanted})
    return found
