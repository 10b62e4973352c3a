"""Accounts for the groups of a run: which may be sampled now, and which step trains on each.

    waiting ──start──▶ running ──finish──▶ ready ──take──▶ handed out
       ▲                  │ lost, too old,   │ lost, too old,  │ rewind
       │                  │ cut off          │ cut off         │
       └──────────────────┴──────────────────┴─────────────────┘

Synchronous, one-step-off and fully asynchronous training differ in one number. The age of a group is the
number of updates between the oldest weights that sampled any of its tokens and those that the step trains
(`Lineage`). `max_staleness` bounds the age twice, with the version of the weights that sample in steps:

    running or ready groups  <=  (version + max_staleness + 1 - steps taken) * groups_per_step + extra_groups
    age of a group that is trained on  <=  max_staleness

The first alone keeps the bound where groups finish in the order in which they start. One that others overtake
becomes too old: it is dropped, counted, and its task is sampled again.

With `extra_groups` a step does not wait for its slowest groups. Those continue for later steps as far as
their age allows; with `max_staleness` 0 they are cut off, and what was cut off twice is waited for.

Nothing here waits or reads a clock: a collector calls it in real time, the simulator in virtual time.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain

from .groups import Dropped, DropReason, GroupAssignment, GroupSummary
from .order import Feedback, Order
from .versions import UNBROKEN, Lineage

# Attempts at one group that fail, or end too old or at its deadline. What is slower than these allow would
# otherwise be sampled for ever, and never trained on. Of attempts that may be cut off the last is waited for.
MAX_ATTEMPTS = 3
_GIVEN_UP_AFTER: frozenset[DropReason] = frozenset({"too_old", "aborted", "deadline", "failed"})


@dataclass(frozen=True)
class CollectorPlan:
    """The sizes of sampling, from the `algorithm` and `logger` sections."""

    groups_per_step: int
    samples_per_group: int
    max_staleness: int
    texts_per_step: int = 0  # samples of a step whose text is kept, spread over its groups
    num_steps: int | None = None  # of the run; nothing is sampled for steps beyond; None: no end
    greedy_baseline: bool = False  # a greedy sample in addition to each group
    extra_groups: int = 0  # started for a step besides those that it trains on, the first to finish
    trains_discarded: bool = False  # also on samples of weights that a restart has discarded
    fixed_weights: bool = False  # engines receive none: all samples are of version 0, and none is too old


@dataclass(frozen=True)
class Refill:
    """Groups of a step that are refused, and how many others may be sampled in their place."""

    accepts: Callable[[GroupSummary], bool]  # a pure function of the group
    max_groups: int  # sampled for one step, the refused ones included; at least `groups_per_step`


@dataclass(frozen=True)
class DataPlace:
    """The place of a run in its data, for a checkpoint. What is neither is sampled after a resume."""

    position: int = 0  # every group before it has been handed out
    beyond: tuple[int, ...] = ()  # groups after it that have been handed out too
    feedback: Feedback | None = None  # of an order by pass rates


@dataclass
class GroupSchedule:
    """The state of every group of a run, as one machine; all methods return immediately."""

    order: Order
    plan: CollectorPlan
    steps_taken: int = 0  # steps whose groups were handed out, since the run began
    place: DataPlace = DataPlace()
    refill: Refill | None = None
    dropped: list[Dropped] = field(default_factory=list)  # since the caller last emptied it
    given_up: list[int] = field(default_factory=list)  # groups too slow `MAX_ATTEMPTS` times, since then
    lineage: Lineage = UNBROKEN  # of the versions of groups
    lost_nodes: Callable[[Set[str]], Set[str]] = lambda nodes: frozenset()  # of these, given by ID

    def __post_init__(self) -> None:
        self._version = self.steps_taken  # of the weights that sample, in steps
        self.order.restore(self.place.feedback)
        self._next = self.place.position  # the first group never started
        self._handed_out = set(self.place.beyond)  # after the place
        self._waiting: list[int] = []  # a heap of groups to start again
        self._attempts: Counter[int] = Counter()  # that ended, of groups that are not handed out
        self._running: set[int] = set()
        self._cut_off: set[int] = set()  # of the running ones
        self._ready: list[GroupSummary] = []
        self._num_usable = 0  # of the ready groups, the first, which the next step may train on
        self._refused: list[GroupSummary] = []  # since the last step was taken

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    @property
    def cut_off(self) -> frozenset[int]:
        """Running groups that the caller ends, because the step that they were started for has been taken."""
        return frozenset(self._cut_off)

    @property
    def num_ready(self) -> int:
        """Groups that the next step may train on."""
        return len(self._ready)

    @property
    def num_refused(self) -> int:
        """Groups since the last step that it does not train on."""
        return len(self._refused)

    @property
    def version(self) -> int:
        """Of the weights that sample."""
        return self.lineage.version(self._version)

    @property
    def resume_place(self) -> DataPlace:
        """The place, for a checkpoint."""
        return replace(self.place, feedback=self.order.feedback)

    @property
    def oldest_version(self) -> int:
        """Groups with tokens of an older version are too old for the next step."""
        if self.plan.fixed_weights:
            return 0
        return self.lineage.oldest(self.steps_taken - self.plan.max_staleness)

    def advance(self, version: int) -> None:
        """The weights after this number of steps sample from now on."""
        self._version = version

    def rewind(self, step: int, place: DataPlace, lineage: Lineage) -> None:
        """Return to the weights after `step`: what was handed out since then is sampled again, as at first.

        Groups that run or are ready stay, as far as a step may train on them.
        """
        self.steps_taken = self._version = step
        self.place, self._handed_out, self.lineage = place, set(place.beyond), lineage
        self._ready, self._refused = map(self._still_usable, (self._ready, self._refused))
        self._num_usable = len(self._ready)
        finished = {group.group for group in (*self._ready, *self._refused)}
        elsewhere = finished | self._running | self._handed_out
        self._waiting = [group for group in range(place.position, self._next) if group not in elsewhere]
        self.given_up = [group for group in self.given_up if group not in self._waiting]
        self.order.reopen(self._waiting)

    def start(self) -> list[GroupAssignment]:
        """The groups that may start now; the caller starts all of them."""
        steps = self._version + self.plan.max_staleness + 1
        if self.plan.num_steps is not None:
            steps = min(steps, self.plan.num_steps)
        size, extra = self.plan.groups_per_step, self.plan.extra_groups
        room = (steps - self.steps_taken) * size - len(self._running) - len(self._ready)
        if steps > self.steps_taken:
            room += extra
        if self.refill is not None:
            # Of the groups that may be sampled for the next step, some have been refused.
            spare = self.refill.max_groups - size - extra - len(self._refused)
            room = min(room, room + spare)
        started = [self._take_waiting() for _ in range(max(0, room))]
        self._running.update(started)
        return [self._assignment(group) for group in started]

    def finish(self, group: GroupSummary) -> bool:
        """Take a group that has been sampled; True if it can be trained on."""
        self._running.remove(group.group)
        if group.group in self._cut_off:
            self._again(Dropped.of_summary(group, "cut_off"))
            return False
        if self.refill is not None and not self.refill.accepts(group):
            self._refused.append(group)
            return False
        self._ready.append(group)
        return True

    def drop(self, dropped: Dropped) -> None:
        """Take back an attempt without a usable result; the group is sampled again."""
        self._running.remove(dropped.group)
        self._again(dropped)

    def take(self) -> list[GroupSummary] | None:
        """The groups of the next step, ordered by id; None until there are enough.

        Of those that are ready the oldest. With `refill` the refused groups are among them, so that there may
        be more than a step trains, or fewer that are accepted.
        """
        new = self._ready[self._num_usable :]
        self._ready[self._num_usable :] = self._without_dropped(new, self._drop_reason)
        self._num_usable = len(self._ready)
        cuts_off = self.plan.extra_groups > 0 and self.plan.max_staleness == 0
        if cuts_off and any(map(self._is_overdue, self._running)):
            return None
        size = self.plan.groups_per_step
        sampled = len(self._ready) + len(self._refused)
        full = self.refill is not None and sampled >= self.refill.max_groups
        if len(self._ready) < size and not full:
            return None
        if self._drop_lost():
            return self.take()
        self._ready.sort(key=lambda g: (g.min_version, not self._is_overdue(g.group), g.group))
        taken, self._ready = self._ready[:size], self._ready[size:]
        taken += self._refused
        self._refused = []
        self.steps_taken += 1
        taken.sort(key=lambda group: group.group)
        self._hand_out([group.group for group in taken], taken)
        self._num_usable = 0
        if cuts_off:
            self._ready = self._without_dropped(self._ready, lambda _: "cut_off")
            self._cut_off = set(self._running)
        return taken

    def _drop_lost(self) -> bool:
        """True if trajectories of ready groups were on a lost node; these groups are sampled again."""
        nodes = {group.node for group in (*self._ready, *self._refused) if group.node}
        if not nodes or not (lost := self.lost_nodes(nodes)):
            return False

        def reason(group: GroupSummary) -> DropReason | None:
            return "lost" if group.node in lost else None

        self._ready, self._refused = (self._without_dropped(g, reason) for g in (self._ready, self._refused))
        self._num_usable = len(self._ready)  # which `take` has checked
        return True

    def _is_overdue(self, group: int) -> bool:
        return self._attempts[group] >= MAX_ATTEMPTS - 1

    def _without_dropped(
        self, groups: Sequence[GroupSummary], reason_of: Callable[[GroupSummary], DropReason | None]
    ) -> list[GroupSummary]:
        """The groups without a reason; the others are sampled again."""
        kept = []
        for group in groups:
            if (reason := reason_of(group)) is None:
                kept.append(group)
            else:
                self._again(Dropped.of_summary(group, reason))
        return kept

    def _still_usable(self, groups: Sequence[GroupSummary]) -> list[GroupSummary]:
        """The groups that the next step may train on; the others do not count as attempts."""
        reasons = [(group, self._drop_reason(group)) for group in groups]
        self.dropped += [Dropped.of_summary(group, reason) for group, reason in reasons if reason is not None]
        return [group for group, reason in reasons if reason is None]

    def _drop_reason(self, group: GroupSummary) -> DropReason | None:
        """Why the next step may not train on a group, if it may not."""
        if self.plan.fixed_weights:
            return None
        spans = {(t.min_version, t.max_version): t.versions for t in group.trajectories}  # mostly one
        versions = set(chain(*spans.values()))
        if not self.plan.trains_discarded and any(map(self.lineage.discarded, versions)):
            return "discarded"
        current = self.lineage.version(self.steps_taken)
        age = max((self.lineage.age(version, current) for version in versions), default=0)
        return "too_old" if age > self.plan.max_staleness else None

    def _again(self, dropped: Dropped) -> None:
        self.dropped.append(dropped)
        self._cut_off.discard(dropped.group)
        self._attempts[dropped.group] += 1
        if dropped.reason in _GIVEN_UP_AFTER and self._attempts[dropped.group] >= MAX_ATTEMPTS:
            self.given_up.append(dropped.group)
            self._hand_out([dropped.group])
        else:
            heappush(self._waiting, dropped.group)

    def _take_waiting(self) -> int:
        """The first group that is not running, ready or handed out."""
        if self._waiting:
            return heappop(self._waiting)
        while self._next in self._handed_out:
            self._next += 1
        self._next += 1
        return self._next - 1

    def _assignment(self, group: int) -> GroupAssignment:
        plan = self.plan
        each, rest = divmod(plan.texts_per_step, plan.groups_per_step)
        return GroupAssignment(
            group,
            self.order.task_index(group),
            plan.samples_per_group,
            num_texts=min(each + (group % plan.groups_per_step < rest), plan.samples_per_group),
            greedy_baseline=plan.greedy_baseline,
            attempt=self._attempts[group],
        )

    def _hand_out(self, groups: Sequence[int], results: Sequence[GroupSummary] = ()) -> None:
        self.order.hand_out(groups, results)
        for group in groups:
            self._attempts.pop(group, None)
            self._handed_out.add(group)
        position = self.place.position
        while position in self._handed_out:
            self._handed_out.remove(position)
            position += 1
        self.place = DataPlace(position, tuple(sorted(self._handed_out)))
        self._next = max(self._next, position)  # which may have passed groups of the place of a resume
