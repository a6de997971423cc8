"""Makes the Kubernetes manifests of a deployment. This module does no I/O; kubectl.py applies the manifests.

The controller is a StatefulSet of one pod behind a Service. Prefill and decode each are a StatefulSet, or a
LeaderWorkerSet if a replica spans several hosts. The engine id of a server is the name of its pod or, in a
LeaderWorkerSet, of the first pod of its replica; vLLM appends _dpN for data-parallel rank N if there are several ranks.
Before Kubernetes stops a server's pod, a preStop hook drains the server. vllm-router finds the servers by the labels of
their pods; the proxy gets the list of servers from the controller. pod_keys.py makes the Secrets with the keys that the
pods mount, pod_tls.py mounts those with certificates.
"""

import json
from typing import Any

from kvferry_launch.cluster import pod_tls
from kvferry_launch.cluster.plan import ENGINE_ROLES, RECOMPUTE
from kvferry_launch.cluster.spec import Role, Spec
from kvferry_launch.node.cluster_key import KEY_ENV, KEY_NAME, MEMBERS_NAME
from kvferry_launch.node.vllm import API_SERVER, KVFERRY_CONNECTOR
from kvferry_launch.paths import command_name

CONTROLLER_PORT = 14600
CONTROLLER_HTTP = 14680
ENGINE_PORT = 8100  # the same for prefill and decode servers, because vllm-router expects all servers at one port
ROUTER_PORT = 8000
KEY_FOLDER, LIST_FOLDER = "/etc/kvferry", "/etc/kvferry-members"
KEY_IN_SECRET, POD_KEY = "/secret/own.key", f"{KEY_FOLDER}/own.key"
# If the Secret lacks the pod's key file, Kubernetes mounts an empty folder in its place, and keeps this folder until
# the pod is deleted, even if the Secret gets the file.
COPY_KEY = (f'[ -f {KEY_IN_SECRET} ] || {{ echo "this pod has no key yet: make one (launch/cluster keys), then delete '
            f'this pod" >&2; exit 1; }}; install -m 0400 {KEY_IN_SECRET} {POD_KEY} && '
            f"ln -sf {LIST_FOLDER}/{MEMBERS_NAME} {KEY_FOLDER}/{MEMBERS_NAME}")
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"  # label whose value is the index of the pod's replica
NO_PRIVILEGES = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
GRACE_S = 120  # time that the last requests have after the drain's time limit, before Kubernetes kills the pod
Object = dict[str, Any]


def manifests(spec: Spec) -> list[Object]:
    objects = [*controller(spec)]
    for name in ENGINE_ROLES:
        objects += engine(spec, spec.roles[name])
    return [*objects, *router(spec)]


def render(spec: Spec) -> str:
    """Returns all manifests as one YAML stream."""
    import yaml  # imported here, because other commands need no PyYAML if the deployment's file is JSON

    # PyYAML would write an object that occurs in two places as an anchor and an alias. Through JSON it becomes two.
    objects = json.loads(json.dumps(manifests(spec)))
    text = "---\n".join(yaml.safe_dump(one, sort_keys=False, width=1000) for one in objects)
    make = f"# The pods need Secrets with their keys; {command_name('cluster')} keys {spec.file.name} makes them.\n"
    return f"# {RECOMPUTE}\n{make if has_keys(spec) else ''}{text}"


def secret_name(spec: Spec, kind: str) -> str:
    return f"{spec.name}-{kind}"


def has_keys(spec: Spec) -> bool:
    """Returns True if pods mount Secrets with their keys; False if `env` of the deployment's file names a key file."""
    return KEY_ENV not in spec.env


def pod_of(spec: Spec, one: Object) -> Object:
    """Returns the specification of a pod that has only the container `one` and does not run as root."""
    user = spec.raw["kubernetes"]["user"]
    return {"securityContext": {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
                                "seccompProfile": {"type": "RuntimeDefault"}}, "containers": [one]}


def member_pod(spec: Spec, one: Object, secret: str, key: str) -> Object:
    """Returns the specification of a pod whose container `one` needs a key. Unless the container's environment names a
    key file already, the pod gets an init container, which copies the file `key` of the Secret `secret`, and no other
    file, to where the container finds it. The Secret's file itself can't be used: in a pod that does not run as root,
    the pod's group can read it, and kvferry refuses a key file that a group can read. Beside the copy is a link to the
    mounted list of members, in which changes of the list's Secret appear.
    """
    inside = pod_of(spec, one) | {"automountServiceAccountToken": False}
    if any(variable["name"] == KEY_ENV for variable in one["env"]):
        return inside
    one["env"] = [*one["env"], {"name": KEY_ENV, "value": POD_KEY}]
    one["volumeMounts"] = [*one.get("volumeMounts", []), {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
                           {"name": "members", "mountPath": LIST_FOLDER, "readOnly": True}]
    copy: Object = {"name": "key", "image": one["image"], "securityContext": NO_PRIVILEGES,
            "command": ["/bin/sh", "-c", COPY_KEY],
            "volumeMounts": [{"name": "secret", "mountPath": KEY_IN_SECRET, "subPathExpr": key, "readOnly": True},
                             {"name": "key", "mountPath": KEY_FOLDER}]}
    if names := [variable for variable in one["env"] if variable["name"] in ("POD_NAME", "GROUP")]:
        copy["env"] = names
    return inside | {"initContainers": [copy], "volumes": [
        {"name": "secret", "secret": {"secretName": secret_name(spec, secret), "defaultMode": 0o400}},
        {"name": "members", "secret": {"secretName": secret_name(spec, "members"), "defaultMode": 0o444}},
        {"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]}


def controller(spec: Spec) -> list[Object]:
    raw = spec.raw["controller"]
    port, http = raw["port"] or CONTROLLER_PORT, raw["http"] or CONTROLLER_HTTP
    secret = spec.raw["kubernetes"]["controller_tls_secret"]
    command = ["kvferry", "controller", "--bind", f"tcp://0.0.0.0:{port}", "--http", f"0.0.0.0:{http}", "--state",
               raw["state"], *pod_tls.certificate_flags(secret, "--http-cert-file", "--http-key-file")]
    pod = container(spec, "controller", command, {"kvferry": port, "http": http}, probe_path="/healthz",
                    probe_port=http)
    claims = []
    if raw["state"] != "none" and spec.raw["kubernetes"]["storage"]:
        pod["volumeMounts"] = [{"name": "state", "mountPath": raw["state"]}]
        claims = [{"metadata": {"name": "state"}, "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": spec.raw["kubernetes"]["storage"]}}}}]
    inside = member_pod(spec, pod, "cluster-key", KEY_NAME)
    pod_tls.serve(inside, secret)
    return [service(spec, "controller", {"kvferry": port, "http": http}),
            stateful_set(spec, "controller", 1, inside, claims)]


def engine(spec: Spec, role: Role) -> list[Object]:
    port = role.port or ENGINE_PORT
    gpus = spec.raw["kubernetes"]["gpus"]
    pod = container(spec, role.name, engine_command(spec, role, port, leader_flags(role)), {"http": port},
                    probe_path="/health", probe_port=port)
    pod["env"] = pod_env(role) + pod["env"] + [{"name": name, "value": value} for name, value in role.env.items()]
    pod["startupProbe"] = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5,
                           "failureThreshold": max(1, spec.ready_timeout_s // 5)}
    drain = ["kvferry", "drain", "$POD_NAME", "--force", "--controller", controller_address(spec), "--namespace",
             spec.namespace, "--timeout", str(spec.drain_timeout_s)]
    pod["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", drain_script(role, drain)]}}}
    if gpus:
        pod["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    # vLLM's processes exchange messages over /dev/shm, of which a container has only 64 MiB by default.
    pod["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    inside = member_pod(spec, pod, f"{role.name}-keys", f"{engine_name(spec, role)}.key")
    inside["terminationGracePeriodSeconds"] = spec.drain_timeout_s + GRACE_S
    inside["volumes"] = [*inside.get("volumes", []), {"name": "shared-memory", "emptyDir": {
        "medium": "Memory", "sizeLimit": spec.raw["kubernetes"]["shared_memory"]}}]
    head = service(spec, role.name, {"http": port}, headless=True)
    if role.hosts_per_replica == 1:
        return [head, stateful_set(spec, role.name, role.replicas, inside, [])]
    return [head, leader_worker_set(spec, role, inside)]


def engine_command(spec: Spec, role: Role, port: int, flags: list[str]) -> list[str]:
    extra = {"namespace": spec.namespace, "serves": f"http://$(POD_IP):{port}", "advertise_host": "$(POD_IP)"}
    config = KVFERRY_CONNECTOR.config(role.kv_role, controller_address(spec), engine_name(spec, role),
                                      extra | role.extra)
    server = list(spec.vllm) or [spec.raw["kubernetes"]["python"], *API_SERVER]
    return [*server, "--model", spec.model, "--host", "0.0.0.0", "--port", str(port), "--kv-transfer-config",
            json.dumps(config), *flags, *role.vllm_flags()]


def engine_name(spec: Spec, role: Role) -> str:
    """Returns the engine id in a pod's command, which is also the name of the pod's member key: the name of the pod or,
    if a replica has several pods, the name of its first pod. A replica's pods share a key, because a decode server lets
    only the member whose scheduler offered a push write the KV.
    """
    return "$(POD_NAME)" if role.hosts_per_replica == 1 else f"{spec.name}-{role.name}-$(GROUP)"


def leader_flags(role: Role) -> list[str]:
    if role.hosts_per_replica == 1:
        return []
    return ["--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank", "0", "--master-addr", "$(LWS_LEADER_ADDRESS)"]


def drain_script(role: Role, drain: list[str]) -> str:
    """Returns the shell script of the preStop hook, which drains a pod's nodes, one for each data-parallel rank. It
    drains all at once, because the pod's grace period has the time of one drain.

    `drain`: the words of the command for one node, in which $POD_NAME stands for the pod's name.
    """
    line = " ".join(f'"{word}"' if "$" in word else word for word in drain)
    if role.data_parallel == 1:
        return line
    ranks = " ".join(str(rank) for rank in range(role.data_parallel))
    return f"for rank in {ranks}; do {line.replace('$POD_NAME', '${POD_NAME}_dp$rank')} & done; wait"


def leader_worker_set(spec: Spec, role: Role, leader: Object) -> Object:
    """Returns a LeaderWorkerSet: each replica is a group of pods on several hosts, in vLLM's multi-node mode.

    `leader`: the specification of each replica's first pod, which runs the HTTP server.
    """
    pod = json.loads(json.dumps(leader))
    worker = pod["containers"][0]
    worker["command"] = engine_command(spec, role, role.port or ENGINE_PORT, [
        "--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr",
        "$(LWS_LEADER_ADDRESS)", "--headless"])
    for only_of_servers in ("readinessProbe", "startupProbe", "livenessProbe", "lifecycle", "ports"):
        worker.pop(only_of_servers, None)
    return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
            "metadata": metadata(spec, role.name),
            "spec": {"replicas": role.replicas, "leaderWorkerTemplate": {
                "size": role.hosts_per_replica,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": {"labels": labels(spec, role.name)}, "spec": leader},
                "workerTemplate": {"metadata": {"labels": labels(spec, f"{role.name}-worker")}, "spec": pod}}}}


def router(spec: Spec) -> list[Object]:
    raw = spec.router
    if raw["kind"] == "none":
        return []
    port = raw["port"] or ROUTER_PORT
    python = spec.raw["kubernetes"]["python"]
    flags = [str(flag) for flag in raw["flags"]]
    account: list[Object] = []
    secret, of_controller = (spec.raw["kubernetes"][f"{one}_tls_secret"] for one in ("router", "controller"))
    if raw["kind"] == "proxy":
        http = spec.raw["controller"]["http"] or CONTROLLER_HTTP
        command = [f"{spec.raw['kubernetes']['path']}/launch/proxy", "--controller",
                   f"{pod_tls.scheme(of_controller)}://{spec.name}-controller:{http}", "--namespace", spec.namespace,
                   *pod_tls.certificate_flags(secret, *pod_tls.PROXY_FLAGS)]
    else:
        namespace = spec.raw["kubernetes"]["namespace"]
        command = [python, "-m", "vllm_router.launch_router", "--policy", "round_robin", "--vllm-pd-disaggregation",
                   "--service-discovery", "--service-discovery-namespace", namespace]
        for role in ENGINE_ROLES:
            command += [f"--{role}-selector", *(f"{name}={value}" for name, value in labels(spec, role).items())]
        command += ["--service-discovery-port", str(spec.roles["prefill"].port or ENGINE_PORT)]
        account = watching_account(spec)
    pod = container(spec, "router", [*command, "--host", "0.0.0.0", "--port", str(port), *flags], {"http": port},
                    probe_path="/health", probe_port=port)
    if raw["kind"] == "proxy":
        # Its /health answers 503 until a decode server is ready, which may take longer than a failing probe has.
        pod["livenessProbe"] |= {"httpGet": pod["readinessProbe"]["httpGet"] | {"path": "/livez"}}
        inside = member_pod(spec, pod, "router-keys", f"{spec.name}-router.key")
        pod_tls.serve(inside, secret)
        pod_tls.trust(inside, of_controller)
    else:
        inside = pod_of(spec, pod)
    if account:
        inside["serviceAccountName"] = f"{spec.name}-router"
    return [*account, service(spec, "router", {"http": port}), {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(spec, "router"),
        "spec": {"replicas": 1, "selector": {"matchLabels": labels(spec, "router")},
                 "template": {"metadata": {"labels": labels(spec, "router")}, "spec": inside}}}]


def watching_account(spec: Spec) -> list[Object]:
    """Returns the ServiceAccount, Role and RoleBinding that let the router list and watch the pods of its namespace."""
    about = metadata(spec, "router")
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": about,
         "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": about,
         "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": about["name"]},
         "subjects": [{"kind": "ServiceAccount", "name": about["name"], "namespace": about["namespace"]}]}]


def controller_address(spec: Spec) -> str:
    return f"tcp://{spec.name}-controller:{spec.raw['controller']['port'] or CONTROLLER_PORT}"


def container(spec: Spec, name: str, command: list[str], ports: dict[str, int], probe_path: str, probe_port: int
              ) -> Object:
    probe = {"httpGet": {"path": probe_path, "port": probe_port}, "periodSeconds": 5}
    return {"name": name, "image": spec.raw["kubernetes"]["image"], "command": command,
            "securityContext": NO_PRIVILEGES,
            "env": [{"name": key, "value": value} for key, value in spec.env.items()],
            "ports": [{"name": key, "containerPort": port} for key, port in ports.items()],
            "readinessProbe": probe, "livenessProbe": probe | {"periodSeconds": 10, "failureThreshold": 6}}


def pod_env(role: Role) -> list[Object]:
    group = [] if role.hosts_per_replica == 1 else [("GROUP", f"metadata.labels['{GROUP_LABEL}']")]
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"), *group)]


def service(spec: Spec, name: str, ports: dict[str, int], headless: bool = False) -> Object:
    inside: Object = {"selector": labels(spec, name),
                      "ports": [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()]}
    if headless:
        inside |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(spec, name), "spec": inside}


def stateful_set(spec: Spec, name: str, replicas: int, pod: Object, claims: list[Object]) -> Object:
    inside: Object = {"serviceName": f"{spec.name}-{name}", "replicas": replicas,
                      "podManagementPolicy": "Parallel", "selector": {"matchLabels": labels(spec, name)},
                      "template": {"metadata": {"labels": labels(spec, name)}, "spec": pod}}
    if claims:
        inside["volumeClaimTemplates"] = claims
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata(spec, name), "spec": inside}


def metadata(spec: Spec, name: str) -> Object:
    return {"name": f"{spec.name}-{name}", "namespace": spec.raw["kubernetes"]["namespace"],
            "labels": labels(spec, name)}


def selector(spec: Spec) -> str:
    """Returns the label selector that matches all pods of the deployment."""
    return f"app.kubernetes.io/name=kvferry,app.kubernetes.io/instance={spec.name}"


def labels(spec: Spec, name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "kvferry", "app.kubernetes.io/instance": spec.name,
            "app.kubernetes.io/component": name}
