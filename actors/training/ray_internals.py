"""Every private part of Ray that training stands on, in one file. All of it is as in ray 2.60.0.

`ControllerCallback`, `WorkerGroupCallback`, `WorkerCallback`: the public `UserCallback` hears of no resize, no restart
and no worker's process. Delete when there are public hooks before a resize and before a failure decision.

`TorchTrainer._initialize_and_run_controller`: a scaling policy of one's own cannot be given. Delete when
`ScalingConfig` takes one, or with the next.

`ElasticScalingPolicy`: it sees the cluster as it was up to 20 s ago (`TICK_INTERVAL_S`) and counts nodes that are being
drained. Delete when its view is fresh, and leaves them out.

`DefaultFailurePolicy`, `_TorchBackend`: Ray's own kill for memory is no `RayActorError`, so one ends the run, whatever
is left of its budget: as a worker starts, or as the group of the dead one is shut down. Delete when both places catch
`OutOfMemoryError`.

`PreemptionInfo`, `mark_preempt`: a drained node is held until its deadline, also when the checkpoint is long written.
Delete when a worker group can say that it is ready to go.

`state.get_draining_nodes`, `get_max_resources_from_cluster_config`: which nodes are going, and what an autoscaler may
add. Delete when both are in `ray.nodes()`.

Environment variables of `ray.train`: the only way to say how often the controller looks. Delete when `RunConfig` does.

What is decided here is decided by `verdict`, `watchdog` and `failures`, which are pure; this file asks and acts.
Callbacks run inside the controller's event loop: whatever waits here is bounded.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.train import TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import (
    InitializingState,
    PreemptingState,
    ReschedulingState,
    ResizingState,
    RestartingState,
    RunningState,
    SchedulingState,
)
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2.api.preemption import PreemptionInfo
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.training import control as controls
from actors.training import verdict as verdicts
from actors.training import watchdog
from actors.training.config import ElasticConfig
from actors.training.control import Group, Incident, Seen, Wish
from actors.training.failures import Repeats, is_collateral
from actors.training.job import OnIncident
from actors.training.verdict import Failure, Verdict
from cluster.errors import FlywheelError

logger = logging.getLogger(__name__)

_ASK_S: Final = 5.0
_TORCH_SHUTDOWN_S: Final = "3"
"""How long the process group of workers that hang may take to close (`TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S`)."""


def environment(config: ElasticConfig) -> dict[str, str]:
    """The environment variables that tell Ray Train's controller how fast to be."""
    return {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(config.notice_s),
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": str(max(0.5, config.notice_s)),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(config.start_timeout_s),
        # Our own word comes first.
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(2 * max(config.stuck_after_s, config.begin_within_s)),
        "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(float(config.collective_timeout_s)),
    }


@contextmanager
def told(config: ElasticConfig) -> Iterator[None]:
    """This process's environment with what Ray Train's controller reads at its start; as it was afterwards."""
    wanted = environment(config)
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in before.items():
        if value not in (None, wanted[name]):
            logger.warning("%s=%s is not heeded: the recipe's elastic section says %s", name, value, wanted[name])
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Trainer(TorchTrainer):
    """`TorchTrainer` whose elastic groups see the cluster as it is, and whose budget is for starts too."""

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        parts["failure_policy"] = FailurePolicy(self.run_config.failure_config)
        if isinstance(parts["scaling_policy"], ElasticScalingPolicy):
            parts["scaling_policy"] = FreshScalingPolicy(self.scaling_config)
        return super()._initialize_and_run_controller(**parts)


class FailurePolicy(DefaultFailurePolicy):
    """Takes a kill for memory while a group starts as one of a worker that works: it counts, and is tried again."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        cause = getattr(training_failed_error, "controller_failure", None)
        if isinstance(cause, OutOfMemoryError):
            training_failed_error = WorkerGroupError(str(cause), {0: cause})
        return super().make_decision(training_failed_error)


class Backend(_TorchBackend):
    """Torch's process group, whose end does not fail for a worker that Ray has killed for memory."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            super().on_shutdown(worker_group, backend_config)
        except OutOfMemoryError as error:
            logger.info("the process group is not closed: %s", error)


class Torch(TorchConfig):
    """`TorchConfig` with `Backend`."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


class FreshScalingPolicy(ElasticScalingPolicy):
    """Counts what is there now, without the nodes that are being drained."""

    GET_RESERVED_RESOURCES_INTERVAL_S = 0.2

    def _get_reserved_resources(self) -> Any:
        try:
            # `recompute` makes the coordinator look at the cluster first, instead of once every 20 s.
            ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True),
                timeout=_ASK_S,
            )
        except RayError as error:
            logger.warning("the autoscaling coordinator did not look again: %s", error)
        return super()._get_reserved_resources()

    def _count_possible_workers(self, reserved_resources: Mapping[str, Mapping[str, float]]) -> int:
        going = draining()
        staying = {node: found for node, found in reserved_resources.items() if node not in going}
        return int(super()._count_possible_workers(staying))


def draining() -> set[str]:
    """Ids of the nodes that are being drained."""
    from ray._private.state import state

    return set(state.get_draining_nodes() or {})


def most_resources() -> dict[str, float]:
    """What the cluster's autoscaler may grow to, by resource; empty where there is none."""
    from ray._private.state import state

    return dict(state.get_max_resources_from_cluster_config() or {})


class TermHandler(WorkerCallback):
    """SIGTERM to a worker's process asks for a checkpoint instead of ending it at once.

    Who wants the process gone sends SIGKILL later, as kubelet and `ray stop` do.
    """

    def after_init_train_context(self) -> None:
        controls.TERMINATED.clear()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: controls.TERMINATED.set())


class RunWatch(ControllerCallback, WorkerGroupCallback):
    """Looks after one run from inside its controller: resizes that cost nothing, verdicts, stuck workers, room."""

    def __init__(
        self,
        control: Any,
        config: ElasticConfig,
        *,
        workers: int,
        elastic: bool,
        run_folder: str,
        on_incident: OnIncident,
    ) -> None:
        self._control, self._config, self._on_incident = control, config, on_incident
        self._workers, self._elastic, self._run_folder = workers, elastic, run_folder
        self._group: Any = None
        self._began = self._looked = time.monotonic()
        self._without_room_since: float | None = time.monotonic()
        self._errors: dict[int, BaseException] = {}
        self._stuck: Verdict | None = None
        self._resize: int | None = None
        self._preempted: PreemptionInfo | None = None
        self._hastened = False
        self._repeats = Repeats()
        self._kills = controls.oom_kills()

    # ------------------------------------------------------------------------------------------ hooks of the controller

    def after_controller_start(self, train_run_context: Any) -> None:  # noqa: ARG002
        os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", _TORCH_SHUTDOWN_S)
        self._without_room_since = time.monotonic()
        self._tell("set_controller", [ray.get_runtime_context().current_actor])

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, ResizingState):
            self._resize = current_state.scaling_decision.num_workers
        elif isinstance(current_state, PreemptingState) and not isinstance(previous_state, PreemptingState):
            self._preempted = current_state.preemption_info
            self._tell("ask", Wish.CHECKPOINT_AND_WAIT)
        elif isinstance(current_state, RunningState):
            self._without_room_since = None
        elif isinstance(current_state, InitializingState | RestartingState | ReschedulingState | SchedulingState):
            self._wait_for_room(spinning=current_state is previous_state)

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:  # noqa: ARG002
        if self._resize is None or self._group is None:
            return
        wanted, self._resize = self._resize, None
        now = len(self._group.get_workers())
        seen = self._let_all_wait()
        if seen is not None:
            line = f"Resized from {now} to {wanted} workers, for which there is room now"
            self._happened(Verdict("resize", line, ""), step=seen.step, lost=seen.step - seen.committed)

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        try:
            reached = self._verdict()
        except Exception:
            # Without a verdict of ours the driver makes one of Ray's error.
            logger.exception("no verdict was reached")
            return
        if reached is None:
            return
        verdict, seen = reached
        ends = failure_decision == FailureDecision.RAISE or verdict.mistake
        self._happened(verdict, step=seen.step, lost=seen.step - seen.committed, ends=ends)
        self._errors, self._stuck, self._preempted, self._hastened = {}, None, None, False
        if ends:
            raise verdict.final()
        self._without_room_since = time.monotonic()

    # ---------------------------------------------------------------------------------------- hooks of the worker group

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group
        self._began = self._looked = time.monotonic()
        self._errors, self._stuck, self._resize = {}, None, None
        self._kills = controls.oom_kills()
        members = tuple(
            (node_name(w.metadata.node_ip, w.metadata.node_id), w.metadata.pid) for w in worker_group.get_workers()
        )
        self._tell("begin_group", Group(time.time(), members))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        self._errors = dict(worker_group_status.errors)
        now = time.monotonic()
        if self._errors or now - self._looked < min(1.0, self._config.notice_s):
            return
        self._looked = now
        try:
            seen = self._see()
            if self._preempted is not None and seen.waiting and not self._hastened:
                self._hasten(self._preempted)
            if self._stuck is None and watchdog.is_stuck(
                seen,
                group_age_s=now - self._began,
                after_s=self._config.stuck_after_s,
                begin_s=self._config.begin_within_s,
            ):
                self._unstick(seen)
        except RayError as error:
            logger.info("the run's control does not answer: %s", error)
        except Exception:
            logger.exception("the watchdog had an error")  # the run goes on without it

    # ------------------------------------------------------------------------------------------------------- verdicts

    def _verdict(self) -> tuple[Verdict, Seen] | None:
        seen = self._see()
        if self._stuck is not None:
            again = self._repeats.again(self._stuck.mark, seen.step)
            return replace(self._stuck, mistake=again), seen
        if self._preempted is not None and not self._errors:
            nodes = ", ".join(node[:8] for node in self._preempted.preempted_node_ids)
            who = verdicts.ranks(self._preempted.preempted_ranks)
            line = f"{who} of {self._size()} lost the node {nodes}: it is taken away"
            return Verdict("preempted", line, "failures.preemptions says how often a run goes on after this."), seen
        if not self._errors or self._group is None:
            return None  # it never got so far as to have workers; `_wait_for_room` bounds that
        found, lost_nodes = self._failures(seen)
        if lost_nodes:
            self._until_known_dead(lost_nodes)
        first = verdicts.judge(found, workers=self._size(), logs=self._run_folder, elastic=self._elastic)
        caused = any(each.kind != "collateral" for each in found)
        again = caused and first.kind in ("error", "data") and self._repeats.again(first.mark, seen.step)
        return verdicts.judge(
            found, workers=self._size(), logs=self._run_folder, elastic=self._elastic, again=again
        ), seen

    def _failures(self, seen: Seen) -> tuple[list[Failure], set[str]]:
        """What happened to each rank, after a second look at those that have not said anything yet."""
        workers = self._group.get_workers()
        errors = dict(self._errors)
        gone = unreachable({worker.metadata.node_id for worker in workers})
        if all(is_collateral(error) for error in errors.values()):
            errors |= self._ask_again([rank for rank in range(len(workers)) if rank not in errors], gone)
        here = ray.get_runtime_context().get_node_id()
        dead = {
            rank
            for rank, error in errors.items()
            if isinstance(getattr(error, "health_check_failure", None), RayActorError)
        }
        seen = self._count_again(dead, gone)
        found = []
        for rank, error in errors.items():
            data = workers[rank].metadata
            name = node_name(data.node_ip, data.node_id)
            kills = seen.memory_kills.get(name)
            if data.node_id == here and self._kills is not None:
                kills = (controls.oom_kills() or 0) - self._kills
            beat = seen.heartbeats.get(rank)
            found.append(
                verdicts.failure_of(
                    rank,
                    error,
                    node=name,
                    pid=data.pid,
                    beat=beat[0] if beat else None,
                    node_lost=data.node_id in gone,
                    memory_kills=kills,
                )
            )
        return found, gone

    def _count_again(self, dead: set[int], gone: set[str]) -> Seen:
        """A look with fresh kills for memory: the last heartbeats are from before those that are to be explained.

        A worker that is left on the node of one of the `dead` tells; where there is none, a task.
        """
        workers = self._group.get_workers()
        here = ray.get_runtime_context().get_node_id()
        asked = {}
        for node_id in {workers[rank].metadata.node_id for rank in dead} - gone - {here}:
            there = [rank for rank, worker in enumerate(workers) if worker.metadata.node_id == node_id]
            left = [rank for rank in there if rank not in dead]
            place = NodeAffinitySchedulingStrategy(node_id, soft=False)
            ref = (
                workers[left[0]].execute_async(controls.oom_kills)
                if left
                else _oom_kills.options(scheduling_strategy=place).remote()
            )
            asked[ref] = node_name(workers[there[0]].metadata.node_ip, node_id)
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S) if asked else ([], [])
        for ref in done:
            try:
                count = ray.get(ref)
            except RayError as error:
                logger.info("node %s does not tell its kills for memory: %s", asked[ref], error)
                continue
            if count is not None:
                self._tell("counted", asked[ref], count)
        return self._see()

    def _ask_again(self, ranks: list[int], gone: set[str]) -> dict[int, BaseException]:
        """Whoever broke the connection is dead by now: ask each of those that were silent."""
        from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

        workers = self._group.get_workers()
        found: dict[int, BaseException] = {}
        asked = {}
        for rank in ranks:
            if workers[rank].metadata.node_id in gone:
                found[rank] = WorkerHealthCheckFailedError(
                    "its node is gone", ray.exceptions.NodeDiedError("its node died")
                )
            else:
                asked[workers[rank].actor.poll_status.remote()] = rank
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=3)
        for ref, rank in asked.items():
            try:
                status = ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError:
                continue
            except RayError as error:
                found[rank] = WorkerHealthCheckFailedError("asked again", error)
                continue
            if isinstance(status.error, UserExceptionWithTraceback):
                found[rank] = status.error._base_exc
        return found

    def _until_known_dead(self, nodes: set[str]) -> None:
        """Wait until Ray's node table knows what a closed port has told already: the next group is made by it."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while time.monotonic() < deadline:
            if not nodes & {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
                return
            time.sleep(0.1)

    def _happened(self, verdict: Verdict, *, step: int, lost: int, ends: bool = False) -> None:
        costs = verdicts.cost(step=step, committed=step - lost, ends=ends)
        incident = Incident(verdict.kind, f"{verdict.line}; {costs}.", verdict.hint, time.time(), step, max(0, lost))
        logger.warning("%s %s", incident.verdict, incident.hint)
        self._tell("happened", incident)

        def record() -> None:
            try:
                self._on_incident(incident)
            except FlywheelError as error:
                logger.warning("the incident is not recorded: %s", error)
            except Exception:
                logger.exception("the incident is not recorded")

        threading.Thread(target=record, daemon=True, name="record-incident").start()

    # --------------------------------------------------------------------------------------------- resizes, preemption

    def _let_all_wait(self) -> Seen | None:
        """Ask for a checkpoint and wait, bounded, until every worker stands still behind it."""
        self._tell("ask", Wish.CHECKPOINT_AND_WAIT)
        deadline = time.monotonic() + self._config.resize_wait_s
        seen = None
        try:
            while time.monotonic() < deadline:
                seen = self._see()
                silent = [rank for rank, (_, ago) in seen.heartbeats.items() if ago > 20 * self._config.notice_s]
                if seen.waiting or silent:
                    break
                time.sleep(min(0.1, self._config.notice_s))
        except RayError as error:
            logger.info("the run's control does not answer: %s", error)
        return seen

    def _hasten(self, info: PreemptionInfo) -> None:
        """All is saved: restart on the other nodes now, not when the deadline has passed."""
        self._hastened = True
        now = PreemptionInfo(int(time.time() * 1000), dict(info.preempted_node_to_ranks))
        for worker in self._group.get_workers():
            worker.actor.mark_preempt.remote(now)

    def _wait_for_room(self, *, spinning: bool) -> None:
        """Between two groups. Ends the run when there has been no room for too long."""
        now = time.monotonic()
        if self._without_room_since is None:
            self._without_room_since = now
        waited = now - self._without_room_since
        if waited > self._config.room_timeout_s:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining()]
            cpus = sum(node.get("CPU", 0) for node in nodes)
            gpus = sum(node.get("GPU", 0) for node in nodes)
            line = (
                f"There was no room for {self._workers} training workers for {waited:.0f} s; "
                f"the cluster has {len(nodes)} nodes with {cpus:g} CPU and {gpus:g} GPU"
            )
            hint = "Lower parallel.workers.min, give Ray more nodes, or raise elastic.room_timeout_s; then --resume."
            raise Verdict("room", line, hint).final()
        if spinning:
            time.sleep(min(0.2, self._config.notice_s))  # Ray's loop does not wait here

    # ------------------------------------------------------------------------------------------------- stuck workers

    def _unstick(self, seen: Seen) -> None:
        workers = self._group.get_workers()
        asked = {worker.execute_async(watchdog.stack_here): rank for rank, worker in enumerate(workers)}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=3)
        stacks = {}
        for ref in done:
            try:
                stacks[asked[ref]] = ray.get(ref)
            except RayError as error:
                logger.info("rank %d does not show its stack: %s", asked[ref], error)
        age_s = time.monotonic() - self._began
        stuck = watchdog.blame(seen, stacks, group_age_s=age_s, every_s=self._config.notice_s)
        self._stuck = verdicts.judge_stuck(
            stuck, stuck_after_s=self._config.stuck_after_s, begin_within_s=self._config.begin_within_s
        )
        for rank, stack in stacks.items():
            logger.warning("stuck after step %d, rank %d:\n%s", stuck.step, rank, stack.text)
            self._write(f"stuck-step-{stuck.step}-rank-{rank}.txt", stack.text)
        for rank in [suspect.rank for suspect in stuck.suspects] or [0]:
            ray.kill(workers[rank].actor)
            _end_process.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(workers[rank].metadata.node_id, soft=False)
            ).remote(workers[rank].metadata.pid)

    def _write(self, name: str, text: str) -> None:
        folder = Path(self._run_folder)
        try:
            if folder.is_dir():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            logger.info("%s is not written: %s", name, error)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _size(self) -> int:
        return len(self._group.get_workers()) if self._group is not None else self._workers

    def _see(self) -> Seen:
        seen: Seen = ray.get(self._control.see.remote(), timeout=_ASK_S)
        return seen

    def _tell(self, what: str, *arguments: Any) -> None:
        try:
            ray.get(getattr(self._control, what).remote(*arguments), timeout=_ASK_S)
        except RayError as error:
            logger.warning("the run's control did not hear %s: %s", what, error)


_oom_kills = ray.remote(num_cpus=0, max_retries=0)(controls.oom_kills)


@ray.remote(num_cpus=0, max_retries=0)
def _end_process(pid: int) -> None:
    """On its node: end a worker that cannot hear its actor being killed, because it is stopped."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def node_name(ip: str, node_id: str) -> str:
    """How a node is named to a person: its address, and enough of its id to tell two on one machine apart."""
    return f"{ip}/{node_id[:6]}"


def here() -> str:
    """`node_name` of this process's node."""
    return node_name(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


def unreachable(nodes: set[str]) -> set[str]:
    """Those of `nodes` that are dead: known to Ray as such, or with a raylet whose port is closed."""
    table = {node["NodeID"]: node for node in ray.nodes()}
    gone = set()
    for node_id in nodes:
        node = table.get(node_id)
        if node is None or not node["Alive"]:
            gone.add(node_id)
            continue
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1).close()
        except OSError:
            gone.add(node_id)
    return gone
