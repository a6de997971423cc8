"""Makes pods as a kubelet does, in folders of this host: volumes of Secrets, their mounts in each container, and the
init container's command. Asks as a kubelet's probes do.
"""

import base64
import os
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Secrets = Mapping[str, Mapping[str, bytes]]


def secrets_of(objects: list[Object]) -> Secrets:
    return {one["metadata"]["name"]: {file: base64.b64decode(data) for file, data in one["data"].items()}
            for one in objects if one["kind"] == "Secret"}


class Pod:
    """A pod named `name` with the labels and the Secrets that are there when it is made. `template`: its spec."""

    def __init__(self, folder: Path, template: Object, name: str, secrets: Secrets, **labels: str) -> None:
        self.folder = folder
        self._template = template
        self._fields = {"metadata.name": name, "status.podIP": "127.0.0.1",
                        **{f"metadata.labels['{label}']": value for label, value in labels.items()}}
        self._volumes: dict[str, Path] = {}
        for volume in template["volumes"]:
            place = self._volumes[volume["name"]] = folder / "volumes" / volume["name"]
            place.mkdir(parents=True)
            if "secret" in volume:
                files = secrets.get(volume["secret"]["secretName"])
                assert files is not None or volume["secret"].get("optional"), "the pod waits for its Secret"
                self.update(volume["name"], files or {})
        self.container = template["containers"][0]

    def update(self, volume: str, files: Mapping[str, bytes]) -> None:
        """Puts the files of a volume's Secret into it, as a kubelet does after each change of the Secret."""
        secret, = (one["secret"] for one in self._template["volumes"] if one["name"] == volume)
        if "items" in secret:
            files = {item["path"]: files[item["key"]] for item in secret["items"]}
        put(self._volumes[volume], files, secret["defaultMode"])

    def command(self) -> list[str]:
        """Returns the command of the container, with this host's paths."""
        return [self._here(word, self.mounts(self.container)) for word in self.container["command"]]

    def probed(self, probe: str) -> int | str:
        """Asks the container, on this host, as a kubelet does for its probe. Returns the status of the answer, or why
        there is none.
        """
        get = self.container[probe]["httpGet"]
        lenient = ssl.create_default_context()
        lenient.check_hostname, lenient.verify_mode = False, ssl.CERT_NONE  # a kubelet checks no certificate
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{get['port']}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=10.0, context=lenient) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as answer:
            return answer.code
        except OSError as error:
            return str(error)

    def start(self) -> subprocess.CompletedProcess[str]:
        """Runs the command of the init container."""
        (one,) = self._template["initContainers"]
        places = self.mounts(one)  # made before the command runs
        words = [self._here(word, places) for word in one["command"]]
        return subprocess.run(words, capture_output=True, text=True, check=False,
                              env={"PATH": os.environ["PATH"], **self.env(one)})

    def env(self, container: Object) -> dict[str, str]:
        """Returns the variables of a container, with this host's paths."""
        places = self.mounts(container)
        return {name: self._here(value, places) for name, value in self._variables(container).items()}

    def mounts(self, container: Object) -> dict[str, Path]:
        """Returns where each path of a container is on this host. A file that a volume lacks becomes a folder."""
        found = {}
        for mount in container["volumeMounts"]:
            if mount["name"] not in self._volumes:
                continue
            place = self._volumes[mount["name"]]
            if "subPathExpr" in mount:
                place /= expanded(mount["subPathExpr"], self._variables(container))
                if not place.exists():
                    place.mkdir()
            found[mount["mountPath"]] = place
        return found

    def seen(self) -> bytes:
        """Returns all bytes that the containers of the pod can read in their volumes."""
        everything = b""
        for container in [*self._template["initContainers"], *self._template["containers"]]:
            for place in self.mounts(container).values():
                files = [place] if place.is_file() else place.rglob("*")
                everything += b"".join(file.read_bytes() for file in files if file.is_file())
        return everything

    def _variables(self, container: Object) -> dict[str, str]:
        return {one["name"]: one["value"] if "value" in one else self._fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
                for one in container.get("env", [])}

    def _here(self, text: str, places: Mapping[str, Path]) -> str:
        """Replaces the containers' paths, also those of other containers' mounts, to which links may point."""
        everywhere = {path: place for container in self._template["containers"]
                      for path, place in self.mounts(container).items()} | dict(places)
        longest_first = sorted(everywhere, key=len, reverse=True)
        pattern = "|".join(rf"{re.escape(path)}(?![\w-])" for path in longest_first)
        return re.sub(pattern, lambda path: str(everywhere[path[0]]), text)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda word: variables[word[1]], text)


def put(volume: Path, files: Mapping[str, bytes], mode: int) -> None:
    """Gives a Secret's volume this content, in one step as a kubelet does: the files are links into a folder, and the
    name of that folder is a link that is replaced. Files are readable by the pod's group too.
    """
    version = volume / f"..{len(list(volume.iterdir()))}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        (version / name).chmod(mode | 0o440)
        if not (volume / name).exists():
            (volume / name).symlink_to(Path("..data") / name)
    (volume / "..next").symlink_to(version.name)
    (volume / "..next").rename(volume / "..data")
