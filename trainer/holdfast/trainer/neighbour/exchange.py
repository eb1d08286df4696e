"""One node's part in the exchange of snapshots with its neighbours, as the flusher uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node.handshake import parse_ports
from holdfast.trainer.neighbour.node_copy import NodeCopy
from holdfast.trainer.neighbour.receiver import CopyReceiver
from holdfast.trainer.neighbour.sender import Aim, Find, Protection, Round, Sender


class Exchange:
    """Sends this node's snapshots to its neighbour, and keeps those of other nodes."""

    def __init__(
        self,
        find: Find,
        *,
        report: Callable[[Protection], object],
        say: Callable[[str], object],
    ) -> None:
        """`find` returns the slots of a launch. `report` is called from a thread."""
        self.reading = threading.Lock()
        self._say = say
        self._receiver = CopyReceiver(say)
        self._sender = Sender(find, reading=self.reading, report=report)
        self._is_started, self._launch = False, 0

    def begin(self, message: Mapping[str, Any]) -> None:
        """Take the flusher supervisor's message `neighbour`: where a launch's copies go."""
        folder = Path(message["folder"])
        launch, node, holder = (int(message[key]) for key in ("launch", "node", "holder"))
        try:
            self._receiver.listen(
                address_of(folder, node),
                launch,
                ports=parse_ports(str(message.get("ports", "any"))),
                addresses=message.get("addresses", ()),
            )
        except (OSError, HoldfastError) as error:
            self._say(f"this node keeps no copies for other nodes: {error}")
        place = address_of(folder, holder)
        self._launch = launch
        self._sender.aim(Aim(launch=launch, node=node, holder=holder, place=place))
        if not self._is_started:
            self._is_started = True
            self._sender.start()

    def begin_round(self, message: Mapping[str, Any]) -> None:
        """Take the flusher supervisor's message `copy`: which step all nodes copy next."""
        if int(message["launch"]) == self._launch:
            number, keep = int(message["round"]), int(message["keep"])
            self._sender.begin(Round(number=number, keep=keep))

    def hold(self, launch: int) -> list[int]:
        """Return the steps of which this node has own copies. All copies stay until `forget`."""
        self._receiver.freeze()
        return self._sender.hold(launch)

    def held_for(self, owner: int, launch: int) -> list[int]:
        """Return the steps of another node whose copies here match that node's checksums."""
        return self._receiver.held(owner, launch)

    def own_copy(self, step: int) -> NodeCopy | None:
        return self._sender.copy_of(step)

    def copy_of(self, owner: int, step: int) -> NodeCopy | None:
        return self._receiver.copy_of(owner, step)

    def forget(self) -> None:
        """Free all copies, of this node and of others."""
        self._receiver.forget()
        self._sender.forget()

    def close(self) -> None:
        if self._is_started:
            self._sender.close()
        self._receiver.close()


def address_of(folder: Path, node: int) -> Path:
    """Return the file by which a node's flusher is reached, in a launch's folder."""
    return folder / f"neighbour-{node:04d}.json"
