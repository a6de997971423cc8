"""The output of `up --dry-run`: every command exactly as `up` would run it, host by host. Starts and writes nothing."""

import shlex
from collections.abc import Iterator

from kvferry_launch.cluster.plan import Found, Planner, placements
from kvferry_launch.cluster.start import Starter
from kvferry_launch.cluster.up import RECOMPUTE


def dry_run(planner: Planner) -> Iterator[str]:
    """Returns the controller's addresses, with PORT and HTTP_PORT for ports that its host will choose."""
    starter = Starter(planner)
    nodes = planner.all()
    address = nodes[0].place.address
    raw = planner.spec.raw["controller"]
    found = Found(f"tcp://{address}:{raw['port'] or 'PORT'}", f"http://{address}:{raw['http'] or 'HTTP_PORT'}")
    yield f"# deployment {planner.spec.name} on {planner.spec.on}: {len(nodes)} nodes"
    yield f"# {RECOMPUTE}"
    for place, here in placements(nodes):
        yield f"# {place.name} ({place.address})" if place.name != place.address else f"# {place.name}"
        for node in here:
            command = planner.command(node, found)
            yield f"# {node.name}"
            yield shlex.join(starter.start(place, node.name, command, node.role == "router"))
