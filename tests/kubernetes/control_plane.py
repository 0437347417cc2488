"""Test helper: runs a real Kubernetes 1.20 control plane on loopback (etcd, API server,
controllers, scheduler), and a client of its API."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Final

import httpx2
import trio
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.house.test_layout import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Json = dict[str, Any]

BIN: Final = ROOT / "build" / "k8s" / "bin"
API: Final = "https://127.0.0.1:6443"
ETCD: Final = "http://127.0.0.1:2379"
STARTS_S: Final = 180.0
CALL_S: Final = 30.0
STOP_S: Final = 20.0
POLL_S: Final = 0.2
MERGE: Final = {"content-type": "application/merge-patch+json"}
SERVICES: Final = "10.96.0.0/16"
PLURALS: Final = {"NetworkPolicy": "networkpolicies", "Endpoints": "endpoints"}


class Api:
    """Calls the API server as an administrator.

    Args:
      token: a token for the group system:masters.

    Attributes:
      client: the HTTP client.
    """

    def __init__(self, token: str) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self.client = httpx2.AsyncClient(
            base_url=API, headers=headers, verify=False, timeout=CALL_S
        )

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request; return the answer, which is a `Status` if it is an error."""
        headers = MERGE if method == "PATCH" else {}
        answer = await self.client.request(method, path, json=body, headers=headers)
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def get(self, path: str) -> Json:
        """Return an object or a list."""
        return must(await self.call("GET", path))

    async def patch(self, path: str, body: Json) -> Json:
        """Merge fields into an object."""
        return must(await self.call("PATCH", path, body))

    async def apply(self, one: Json) -> Json:
        """Create an object, or update the given fields of an existing one."""
        path, name = path_of(one), one["metadata"]["name"]
        created = await self.call("POST", path, one)
        if created.get("reason") == "AlreadyExists":
            return await self.patch(f"{path}/{name}", one)
        return must(created)

    async def is_up(self) -> bool:
        """Return whether the API server is ready."""
        with suppress(httpx2.TransportError):
            return (await self.client.get("/readyz")).is_success
        return False


def must(answer: Json) -> Json:
    """Return an answer; assert that it is not an error."""
    assert (answer.get("kind"), answer.get("status")) != ("Status", "Failure"), answer["message"]
    return answer


def path_of(one: Json) -> str:
    """Return the path of an object's collection."""
    version, kind = one["apiVersion"], one["kind"]
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = PLURALS.get(kind, f"{kind.lower()}s")
    space = one["metadata"].get("namespace")
    return f"{group}/namespaces/{space}/{plural}" if space else f"{group}/{plural}"


@asynccontextmanager
async def control_plane(folder: Path) -> AsyncIterator[tuple[Api, Path]]:
    """Run the processes; yield a client, and a kubeconfig for kubectl."""
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},root,root,system:masters\n")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(server=API, token=token))
    write_key_pair(folder)
    api = Api(token)
    with ExitStack() as stack:
        for name, arguments in commands(folder, kubeconfig).items():
            output = stack.enter_context((folder / f"{name}.log").open("wb"))
            stack.callback(stop, start([str(BIN / name), *arguments], folder, output))
            if name == "kube-apiserver":
                # The other processes exit without the API server.
                with trio.fail_after(STARTS_S):
                    while not await api.is_up():  # noqa: ASYNC110
                        await trio.sleep(POLL_S)
        yield api, kubeconfig
        await api.client.aclose()


def commands(folder: Path, kubeconfig: Path) -> dict[str, list[str]]:
    """Return the arguments of each process."""
    peer = "http://127.0.0.1:2380"
    client = [
        *(f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0"),
        # The default of 20 calls per second delays Endpoints during many changes.
        *("--kube-api-qps=500", "--kube-api-burst=500"),
    ]
    return {
        "etcd": [
            *(f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={ETCD}"),
            *(f"--advertise-client-urls={ETCD}", f"--listen-peer-urls={peer}"),
            *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
            # No durability: nothing here outlives the test.
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            *(f"--etcd-servers={ETCD}", "--bind-address=127.0.0.1", "--secure-port=6443"),
            *(f"--cert-dir={folder / 'certs'}", f"--service-cluster-ip-range={SERVICES}"),
            *("--advertise-address=10.96.255.1", "--allow-privileged=true"),
            *(f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC"),
            *(
                "--service-account-issuer=https://test",
                f"--service-account-key-file={folder}/sa.pub",
            ),
            f"--service-account-signing-key-file={folder}/sa.key",
            # Pods of a lost node are replaced after seconds, not minutes.
            "--default-not-ready-toleration-seconds=2",
            "--default-unreachable-toleration-seconds=2",
        ],
        "kube-controller-manager": [
            *client,
            f"--service-account-private-key-file={folder}/sa.key",
            *("--node-monitor-period=1s", "--node-monitor-grace-period=6s"),
            *("--node-eviction-rate=10", "--secondary-node-eviction-rate=10"),
            *("--horizontal-pod-autoscaler-sync-period=2s", "--concurrent-deployment-syncs=2"),
        ],
        "kube-scheduler": client,
    }


def quiet() -> dict[str, str]:
    """Return an environment without HTTP proxies."""
    return {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}


def start(command: list[str], folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process of the control plane."""
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=quiet())


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of the control plane."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_key_pair(folder: Path) -> None:
    """Write the keys of service account tokens, which no pod uses."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "sa.key").write_bytes(private)
    (folder / "sa.pub").write_bytes(public)


KUBECONFIG: Final = """\
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "{server}", insecure-skip-tls-verify: true}}}}]
users: [{{name: root, user: {{token: "{token}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: root}}}}]
current-context: test
"""
