"""`cluster`, `logger`, `checkpointing`: where a run executes, what it shows and what it keeps."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from nemorl.errors import Problem, Problems

from .base import EXPERT, SIMPLE, Config, FieldLevel, check
from .trackers import TrackerConfig

_MOVE_SECONDS = 15.0  # for Ray to find room on nodes that are there
_REPLACE_SECONDS = 1800.0


class DeadlineConfig(Config):
    """Seconds a stage may take before the run stops and names the process it waits for."""

    field_level: ClassVar[FieldLevel] = "expert"
    start: float = Field(600.0, gt=0)
    """Starting worker processes and loading weights."""
    generation: float = Field(1800.0, gt=0)
    """Sampling all trajectories of a step, environments included."""
    health: float = Field(30.0, gt=0)
    """Between two health checks of an engine or rollout worker, which is lost without an answer in time."""
    engine_step: float = Field(600.0, gt=0)
    """One step of an engine that has work; an engine that takes longer is lost."""
    environment: float = Field(60.0, gt=0)
    """One call of an environment or a reward."""
    outage: float | None = Field(None, ge=0)
    """Repeating calls of a reward's server or of an environment's service that does not answer; null is half
    of `generation`."""
    logprobs: float = Field(1800.0, gt=0)
    """Recomputing logprobs of a batch."""
    training: float = Field(3600.0, gt=0)
    """Forward, backward and update over a batch."""
    refit: float = Field(600.0, gt=0)
    """Sending the weights to generation."""
    checkpoint: float = Field(1800.0, gt=0)
    """Writing or reading a checkpoint."""
    lost_node: float | None = Field(None, gt=0)
    """Waiting for a node in place of a lost one of a model; null is 1800, or 15 if `cluster.on_lost_node` is
    `shrink`."""
    stall: float = Field(300.0, gt=0)
    """Without progress of a stage; the run then writes a stall report, and continues to wait."""

    @property
    def outage_seconds(self) -> float:
        return self.generation / 2 if self.outage is None else self.outage

    @property
    def by_stage(self) -> dict[str, float]:
        """Of the stages of a step that have one of their own."""
        return {name: getattr(self, name) for name in ("generation", "logprobs", "training", "refit")}

    @check
    def _outage_ends_before_sampling(self) -> Problems:
        if self.outage is not None and self.outage >= self.generation:
            fix = f"the run ends after cluster.deadlines.generation, {self.generation:g}, without a group"
            yield Problem("outage", self.outage, f"{fix}; set it to less")


class ClusterConfig(Config):
    num_nodes: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """Machines; more than one are those of the Ray cluster that RAY_ADDRESS names."""
    gpus_per_node: int = Field(0, ge=0, json_schema_extra=SIMPLE)
    """GPUs of each machine; 0 runs everything on the CPU."""
    placement: Literal["auto", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "auto", json_schema_extra=EXPERT
    )
    """Ray's strategy for placing workers over machines; `auto`: STRICT_PACK on one, PACK on several."""
    labels: dict[str, dict[str, str]] = Field({}, json_schema_extra=EXPERT)
    """Labels that Ray's nodes must have, by group of workers (`policy`, `rollout`, …)."""
    topology: dict[str, str] = Field({}, json_schema_extra=EXPERT)
    """By group of workers, a label with the same value on all its nodes, such as ray.io/gpu-domain."""
    rollout_workers: int = Field(1, ge=1)
    """Processes that run turn loops, environments and rewards."""
    policy_threads: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """CPU threads of each policy process; the cores divided by the processes when not given."""
    object_store_megabytes: int = Field(512, ge=100, json_schema_extra=EXPERT)
    """Shared memory that a local Ray sets aside for objects."""
    max_model_restarts: int = Field(3, ge=0, json_schema_extra=EXPERT)
    """Restarts in a row, without a further step, of models that lost a process; then the run stops. They
    continue from the newest checkpoint. Models that do not train repeat the batch in which they were lost,
    and the limit is for a batch."""
    on_lost_node: Literal["wait", "shrink", "fail"] = Field("wait", json_schema_extra=EXPERT)
    """What a model does whose ranks were on a lost node: `wait` until other nodes have room for them, such as
    one that replaces it, and restart there; `shrink`, if there is no room in time, to a smaller data-parallel
    size on the nodes that are left; or `fail`, by which the run ends."""
    max_worker_restarts: int = Field(3, ge=0, json_schema_extra=EXPERT)
    """Restarts in a row, without work in between, of an engine or rollout worker; then it stays lost."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Seconds each stage may take."""

    @property
    def lost_node_seconds(self) -> float:
        seconds = self.deadlines.lost_node
        usual = _MOVE_SECONDS if self.on_lost_node == "shrink" else _REPLACE_SECONDS
        return usual if seconds is None else seconds

    @property
    def strategy(self) -> str:
        """Ray's strategy that `placement` resolves to."""
        automatic = "STRICT_PACK" if self.num_nodes == 1 else "PACK"
        return automatic if self.placement == "auto" else self.placement

    @check
    def _lost_nodes_are_waited_for(self) -> Problems:
        seconds = self.deadlines.lost_node
        if self.on_lost_node == "fail" and seconds is not None:
            fix = "cluster.on_lost_node is fail, so nothing waits for a node; remove one of the two"
            yield Problem("deadlines.lost_node", seconds, fix)
        if self.on_lost_node == "shrink" and not self.max_model_restarts:
            fix = "cluster.max_model_restarts is 0, so no model is restarted; raise it, or remove this"
            yield Problem("on_lost_node", self.on_lost_node, fix)

    @check
    def _domains_have_several_nodes(self) -> Problems:
        for group, label in self.topology.items():
            if label == "ray.io/node-id":
                fix = "every node has another value of it; set cluster.placement to STRICT_PACK instead"
                yield Problem(f"topology.{group}", label, fix)


class PrometheusConfig(Config):
    """Metrics for a Prometheus server, at `http://HOST:PORT/metrics`."""

    field_level: ClassVar[FieldLevel] = "expert"
    host: str = "127.0.0.1"
    """Where the driver listens. Nothing asks for a key: any process that reaches it reads the metrics."""
    port: int = Field(9400, ge=0, le=65535)
    """The port; 0 is a free one, which the header of the run names."""


def _as_selection(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """One error for a value that is none of the kinds, in place of one for each."""
    try:
        return validate(value)
    except ValidationError as error:
        expected = "expected `none`, `sampled`, `all` or an integer of at least 0"
        raise PydanticCustomError("selection", expected) from error


class LoggerConfig(Config):
    console: Literal["auto", "rich", "plain"] = "auto"
    """Bars and tables, or plain lines; `auto` shows bars on a terminal."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Where metrics are also reported: names, such as `[tensorboard, wandb]`, or sections with a `name`."""
    prometheus: PrometheusConfig | None = None
    """Serve the newest metrics and the running stages to Prometheus; null listens nowhere."""
    samples_per_step: int = Field(4, ge=0)
    """Trajectories of each step written to samples.jsonl with their text."""
    trajectories: Annotated[
        Literal["none", "sampled", "all"] | Annotated[int, Field(ge=0)], WrapValidator(_as_selection)
    ] = "sampled"
    """Trajectories of each step written to trajectories/ with all of their tokens, as complete groups until
    there are as many: a number, all, none, or as many as `samples_per_step`."""

    @property
    def num_trajectories(self) -> float:
        match self.trajectories:
            case "none":
                return 0
            case "sampled":
                return self.samples_per_step
            case "all":
                return math.inf
        return self.trajectories

    @check
    def _each_tracker_is_named_once(self) -> Problems:
        names = [tracker.name for tracker in self.trackers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem("trackers", name, "it is there twice, and a run has one record of each; remove one")


class CheckpointingConfig(Config):
    enabled: bool = True
    """Write checkpoints."""
    period: int = Field(10, ge=1, json_schema_extra=SIMPLE)
    """Steps between checkpoints; the last step is always saved. A run that is killed loses at most these
    steps."""
    asynchronous: bool = Field(True, json_schema_extra=EXPERT)
    """Write from a copy in host memory while training continues; false waits until the files are written."""
    memory_period: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Steps between checkpoints in the nodes' memory, for lost processes; null keeps none there."""
    memory_dir: Path = Field(Path("/dev/shm"), json_schema_extra=EXPERT)
    """Folder in memory (tmpfs) of each node for these checkpoints."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept; with two, a corrupt one leaves another."""
    stop_seconds: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Seconds from SIGTERM or SIGUSR1 to the end of the run. A step that has not ended after half of them is
    dropped, and the checkpoint is of the step before, whose state is copied for this. null: without limit."""
    max_failures: int = Field(3, ge=0, json_schema_extra=EXPERT)
    """Checkpoints in a row that the disk may refuse, as when it is full, before the run ends."""
    metric: str | None = None
    """Also keep the checkpoint with the best value of this metric, such as `validation/reward`."""
    higher_is_better: bool = True
    """Whether the best value is the highest."""
    export_hf: bool = False
    """Also write the weights into every checkpoint as a Hugging Face folder, `hf/`."""
    save_hf: bool = Field(False, json_schema_extra=SIMPLE)
    """Write the last checkpoint's weights as a Hugging Face folder `hf/` into the run folder."""
    max_shard_gigabytes: float = Field(5.0, gt=0, json_schema_extra=EXPERT)
    """Largest file of weights in these folders, in 10^9 bytes; a tensor is never divided."""

    @property
    def shard_bytes(self) -> int:
        return round(self.max_shard_gigabytes * 1e9)

    @property
    def keeps_in_memory(self) -> bool:
        return self.enabled and self.memory_period is not None

    @check
    def _checkpoints_are_written(self) -> Problems:
        if self.memory_period is None:
            reason = "checkpointing.memory_period is not given; set it, or remove this"
            yield from self.without_effect(("memory_dir",), reason)
        elif self.enabled and not self.asynchronous:
            fix = "they are written from a copy: set checkpointing.asynchronous to true, or this to null"
            yield Problem("memory_period", self.memory_period, fix)
        if self.enabled and self.stop_seconds is not None and not self.asynchronous:
            fix = "the checkpoint may be of a copy: set checkpointing.asynchronous to true, or this to null"
            yield Problem("stop_seconds", self.stop_seconds, fix)
        if self.metric is None:
            reason = "checkpointing.metric is not given; set it, or remove this"
            yield from self.without_effect(("higher_is_better",), reason)
        if self.enabled and not (self.export_hf or self.save_hf):
            reason = "neither checkpointing.save_hf nor export_hf is true; set one, or remove this"
            yield from self.without_effect(("max_shard_gigabytes",), reason)
        if not self.enabled:
            others = type(self).model_fields.keys() - {"enabled", "higher_is_better"}
            reason = "checkpointing.enabled is false, so no checkpoint is written; remove one of the two"
            yield from self.without_effect(sorted(others), reason)
