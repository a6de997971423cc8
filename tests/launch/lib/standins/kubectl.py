"""Stands in for kubectl in tests. In the folder STANDIN it keeps Secrets and what it was told, and it has the pods of
pods.json between `apply` and `delete`.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["STANDIN"])


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def secret_file(name: str) -> Path:
    folder = FOLDER / "secrets"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.json"


def save_secret(verb: str) -> None:
    secret = json.load(sys.stdin)
    assert (secret["apiVersion"], secret["kind"]) == ("v1", "Secret")
    about = secret["metadata"]
    file = secret_file(about["name"])
    former = json.loads(file.read_text())["metadata"]["resourceVersion"] if file.exists() else None
    if (former is None) != (verb == "create"):
        fail(f'secrets "{about["name"]}" {"not found" if former is None else "already exists"}')
    if former is not None and about.get("resourceVersion") != former:
        fail("Operation cannot be fulfilled: the object has been modified")
    about["resourceVersion"] = str(int(former or 0) + 1)
    file.write_text(json.dumps(secret))


def get_secrets(names: list[str]) -> None:
    found = [json.loads(secret_file(name).read_text()) for name in names if secret_file(name).exists()]
    if found:
        print(json.dumps({"kind": "List", "items": found}))


words = sys.argv[1:]
with (FOLDER / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\n")
del words[:words.index("--namespace") + 2]
up = FOLDER / "up"
match words:
    case ["get", "secret", *names, "--ignore-not-found", "-o", "json"]:
        get_secrets(names)
    case ["create" | "replace", "-f", "-"]:
        save_secret(words[0])
    case ["apply", *_]:
        (FOLDER / "applied").write_text(sys.stdin.read())
        up.touch()
        print("service/demo-controller created")
    case ["get", "pods", *_]:
        print((FOLDER / "pods.json").read_text() if up.exists() else '{"items": []}')
    case ["delete", *_]:
        sys.stdin.read()
        up.unlink()
    case ["scale" | "annotate", *_]:
        print("done")
    case _:
        fail(f"there is no command {words}")
