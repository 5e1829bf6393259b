"""The machines of a fleet, and what their agents report.

A machine is in one of these:

    here, well          joined; has ranks, stands by, or was told to leave
    here, broken        a fault of its devices that the job has not sent it away for: it fails again when it works
    gone, broken        in repair until its outage ends, then it joins
    gone, well          was sent away and is well: joins a little later
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core import events as e
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.faults.fault_table import fault_of
from holdfast.core.health.reputation import Reputation
from holdfast.core.views import Member

DEVICE_FAULT, PROCESS_FAULT = "device-error", "exited"
FIRST_PORT = 20_000
PORTS = 40_000


@dataclass(slots=True)
class SimulatedMachine:
    """One machine and its agent."""

    number: int
    name: str
    incarnation: int = 0
    is_here: bool = False
    is_banned: bool = False
    """Whether it joined as a last resort."""
    broken_until: float = -1.0
    """Below zero: it is well."""
    ready_at: float = 0.0
    """When its workers are parked."""

    @property
    def life(self) -> str:
        """Return the name of its agent's incarnation."""
        return f"{self.name}.{self.incarnation}"

    @property
    def is_broken(self) -> bool:
        return self.broken_until >= 0.0


class SimulatedFleet:
    """All machines, and the events that their agents send."""

    def __init__(self, nodes: int, workers_per_node: int, spec: e.JobSpec, racks_of: int = 16) -> None:
        width = len(str(nodes - 1))
        self.machines = [SimulatedMachine(n, f"n{n:0{width}}") for n in range(nodes)]
        self.by_name = {machine.name: machine for machine in self.machines}
        self._workers, self._spec, self._racks_of = workers_per_node, spec, racks_of
        self._ports = 0

    def hello(self, machine: SimulatedMachine, reputation: Reputation) -> e.Hello:
        """Return the first words of a machine's next incarnation."""
        before = machine.life
        machine.incarnation += 1
        machine.is_here = True
        info = e.NodeInfo(
            host=machine.name,
            address=machine.name,
            machine_id=machine.name,
            boot_id=str(machine.incarnation),
            pid=1,
            workers=self._workers,
            domain=f"rack{machine.number // self._racks_of}",
        )
        return e.Hello(
            node_id=machine.name,
            incarnation=machine.life,
            info=info,
            spec=self._spec,
            store_port=self._port(),
            dead_incarnations=(before,),
            reputation=reputation,
        )

    def offer(self, node_id: str) -> e.StoreOffered:
        """Return a node's offer of the next view's store."""
        return e.StoreOffered(node_id=node_id, incarnation=self.by_name[node_id].life, port=self._port())

    def parked(self, machine: SimulatedMachine, spares: int) -> e.SparesChanged:
        return e.SparesChanged(node_id=machine.name, incarnation=machine.life, parked=spares)

    def link_broke(self, machine: SimulatedMachine) -> e.LinkBroke:
        return e.LinkBroke(node_id=machine.name, incarnation=machine.life)

    def failure(self, machine: SimulatedMachine, member: Member, view: int, fault: str, now: float) -> e.WorkerFailed:
        """Return the report of a worker that failed."""
        failure = Failure(
            node_id=machine.name,
            view=view,
            rank=member.first_rank,
            local_rank=0,
            pid=machine.incarnation,
            end=Exited(1),
            failed_at=now,
            fault=fault_of(fault),
        )
        return e.WorkerFailed(node_id=machine.name, incarnation=machine.life, view=view, failure=failure)

    def _port(self) -> int:
        self._ports += 1
        return FIRST_PORT + self._ports % PORTS
