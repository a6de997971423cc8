"""What `up --dry-run` prints: every command exactly as it would be run, host by host. Nothing is started or written."""

import shlex
from collections.abc import Iterator

from kvferry_launch.cluster.plan import Found, Planner, placements
from kvferry_launch.cluster.start import Starter
from kvferry_launch.cluster.up import RECOMPUTE


def dry_run(planner: Planner) -> Iterator[str]:
    """CONTROLLER_HOST is known; PORT and HTTP_PORT are chosen by the controller's host where the file says 0."""
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
