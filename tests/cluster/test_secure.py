"""Keys and mutual TLS in a real cluster: routers started by Serve read the files, both front ends
require both, and the command line provides both."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AuthenticationError, OpenAI

from protocol.wire import inference_pb2 as wire
from tests.cluster.conftest import CHUNKED, MODEL, PATIENT, SMALL_KV, Baton, get_cluster
from tests.cluster.load import LONG, wait_until
from tests.cluster.test_lifecycle import assert_nothing_stays
from tests.support import services
from tests.support.certificates import Authority, Pair

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "green"]}},
    "required": ["sky"],
    "additionalProperties": False,  # or the model may write on until it is cut off
}


@dataclass(frozen=True)
class Secured:
    """A cluster with two keys and a client CA."""

    baton: Baton
    authority: Authority
    client: Pair
    stranger: Pair
    keys_file: Path
    user: str
    admin: str

    def http(self, certificate: Pair | None) -> httpx.Client:
        trusting = ssl.create_default_context(cafile=self.authority.ca_file)
        if certificate is not None:
            trusting.load_cert_chain(certificate.cert, certificate.key)
        url = f"https://{self.baton.state()['http']}"
        return httpx.Client(verify=trusting, base_url=url, timeout=60)

    def channel(self, certificate: Pair | None) -> grpc.Channel:
        files = (None, None)
        if certificate is not None:
            files = (Path(certificate.key).read_bytes(), Path(certificate.cert).read_bytes())
        credentials = grpc.ssl_channel_credentials(self.authority.pem, *files)
        return grpc.secure_channel(str(self.baton.state()["grpc"]), credentials)


def new_key(baton: Baton, name: str) -> tuple[str, str]:
    """A fresh key and its entry of the file, as the command prints them."""
    lines = baton.run("keys", "new", name).stdout.splitlines()
    key = lines[0].rpartition(" ")[2]
    start = next(i for i, line in enumerate(lines) if line.startswith("- name:"))
    return key, "\n".join(lines[start : start + 2]) + "\n"


@pytest.fixture(scope="module")
def secured(shared_baton: Baton, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    folder = tmp_path_factory.mktemp("secrets")
    authority = Authority(folder)
    server, client = authority.issue("server"), authority.issue("client")
    stranger = Authority(folder, "elsewhere").issue("stranger")
    (user, entry), (admin, admin_entry) = (new_key(shared_baton, name) for name in ("team", "ops"))
    keys_file = folder / "keys.yaml"
    keys_file.write_text(f"keys:\n{entry}{admin_entry}  admin: true\n")
    shared_baton.up(
        "secure.yaml",
        "network.host=127.0.0.1",
        f"router.settings.api_keys_file={keys_file}",
        f"router.settings.tls.cert_file={server.cert}",
        f"router.settings.tls.key_file={server.key}",
        f"router.settings.tls.client_ca_file={authority.ca_file}",
        *CHUNKED,
        *PATIENT,
        *SMALL_KV,
    )
    return Secured(shared_baton, authority, client, stranger, keys_file, user, admin)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def test_both_front_ends_serve_clients_with_certificate_and_key(secured: Secured) -> None:
    body: dict[str, Any] = {"prompt": LONG, "max_tokens": 8, "temperature": 0.0}
    with secured.http(secured.client) as http:
        client = OpenAI(
            base_url=f"{http.base_url}/v1", api_key=secured.user, http_client=http, max_retries=0
        )
        text = client.completions.create(model=MODEL, **body).choices[0].text
        form: Any = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What colour is the sky?"}],
            response_format=form,
            max_tokens=60,
            temperature=0.0,
        )
        assert (
            json.loads(answer.choices[0].message.content)["sky"]
            in SCHEMA["properties"]["sky"]["enum"]
        )
    with secured.channel(secured.client) as channel:
        call = services.InferenceStub(channel).Generate(
            wire.GenerateRequest(**body), metadata=bearer(secured.user), timeout=60
        )
        assert "".join(choice.text for message in call for choice in message.choices) == text
    arguments = ["--tls-ca", secured.authority.ca_file, "--tls-cert", secured.client.cert]
    arguments += ["--tls-key", secured.client.key, "--api-key", secured.user]
    target = str(secured.baton.state()["grpc"])
    asked = ["--max-tokens", "8", "--temperature", "0"]
    done = secured.baton.run("generate", LONG, "--target", target, *arguments, *asked)
    assert text.strip() in done.stdout
    load = ["--concurrency", "1", "--requests", "2", "--repeats", "1", "--output-tokens", "8"]
    for front_end in ([], [f"grpc://{target}"]):
        assert "1 client" in secured.baton.run("bench", *front_end, *arguments, *load).stdout


def test_other_clients_are_refused(secured: Secured) -> None:
    models = wire.ListModelsRequest()
    for certificate in (None, secured.stranger):
        with secured.http(certificate) as http, pytest.raises(httpx.TransportError):
            http.get("/health")
        with secured.channel(certificate) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                services.InferenceStub(channel).ListModels(models, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with secured.http(secured.client) as http:
        for path in ("/health", "/ready", "/metrics"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer baton-wrong"}):
            answer = http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        client = OpenAI(base_url=f"{http.base_url}/v1", api_key="sk-wrong", http_client=http)
        with pytest.raises(AuthenticationError):
            client.models.list()
    with secured.channel(secured.client) as channel:
        inference, admin = services.InferenceStub(channel), services.AdminStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            inference.ListModels(models, timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as refused:
            admin.GetCluster(wire.GetClusterRequest(), timeout=30, metadata=bearer(secured.user))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        view = get_cluster(channel, bearer(secured.admin))
        assert {pool.role for pool in view.pools} == {"prefill", "decode"}
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_key_can_be_added_and_taken_away(secured: Secured) -> None:
    key, entry = new_key(secured.baton, "late")
    before = secured.keys_file.read_text()
    with secured.http(secured.client) as http:

        def status() -> int:
            return http.get("/v1/models", headers=dict(bearer(key))).status_code

        assert status() == 401
        secured.keys_file.write_text(before + entry)
        wait_until(lambda: status() == 200)
        secured.keys_file.write_text(before)
        wait_until(lambda: status() == 401)


def test_the_operator_needs_no_key_and_nothing_stays(secured: Secured) -> None:
    assert "decode-" in secured.baton.run("status").stdout
    secured.baton.run("down")
    assert_nothing_stays(secured.baton)
