"""The responses stored by all routers: an id says which one has it, and the others ask that one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import BatonError, InvalidRequest, NotFound, Unavailable
from protocol.stored_responses import ResponseAction, ResponseCopy, ResponseQuery
from router.offload import off_loop
from router.responses.request import InputTokensRequest, new_messages, to_chat
from router.responses.store import ResponseStore, StoredResponse, ended_messages
from rpc.client import ClientPool
from rpc.methods import RESPONSE
from rpc.server import ControlServer

#: How long another router may take to answer; longer than a cancelled response may take to end.
_TIMEOUT_S = 10.0
#: How long that is: then it is shown as it is.
_CANCEL_S = 5.0
_ID = re.compile(r"resp_([0-9a-f]{12})_[0-9a-f]+")


class SharedResponses:
    """`local` are this router's own. `start` serves them to the other routers, whose addresses by
    their ids `set_peers` gives."""

    def __init__(self, router_id: str, local: ResponseStore, *, secret: bytes) -> None:
        self.local = local
        self._own = _tag(router_id)
        self._peers: dict[str, str] = {}
        self._clients = ClientPool(secret=secret)
        self._server = ControlServer({RESPONSE: self._on_query}, secret=secret)

    async def start(self, host: str) -> str:
        """Listen on a free port; returns the address."""
        return await self._server.start(f"[{host}]" if ":" in host and host[0] != "[" else host)

    async def stop(self) -> None:
        await self._server.stop()
        await self._clients.close()

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        self._peers = {_tag(router_id): address for router_id, address in addresses.items()}

    def response_id(self, request_id: str) -> str:
        return f"resp_{self._own}_{request_id}"

    def elsewhere(self, response_id: str | None) -> bool:
        """Whether another router has made it."""
        found = _ID.fullmatch(response_id or "")
        return found is not None and found[1] != self._own

    async def find(
        self, response_id: str, owner: str, action: ResponseAction = ResponseAction.READ
    ) -> StoredResponse:
        """A response, here or elsewhere, after what is done to it. Raises NotFound, InvalidRequest,
        and Unavailable when its router does not answer."""
        if not self.elsewhere(response_id):
            return await self._act(response_id, owner, action)
        found = _ID.fullmatch(response_id)
        assert found is not None
        address = self._peers.get(found[1])
        if address is None:
            raise NotFound(f"the router that stored the response {response_id!r} is gone")
        query = ResponseQuery(response_id=response_id, owner=owner, action=action)
        try:
            copy = await self._clients.get(address).call(RESPONSE, query, timeout_s=_TIMEOUT_S)
        except (NotFound, InvalidRequest):
            raise
        except BatonError as error:
            raise Unavailable(
                f"the router that stored the response {response_id!r} does not answer",
                retry_after_s=1.0,
            ) from error
        parts = await off_loop(lambda: json.loads(copy.parts), size=len(copy.parts))
        return StoredResponse(owner=owner, response=parts[0], items=parts[1], messages=parts[2])

    async def _on_query(self, query: ResponseQuery) -> ResponseCopy:
        entry = await self._act(query.response_id, query.owner, query.action)
        parts = entry.response, entry.items, entry.messages
        text = await off_loop(lambda: json.dumps(parts), size=entry.size)
        return ResponseCopy(parts=text.encode())

    async def _act(self, response_id: str, owner: str, action: ResponseAction) -> StoredResponse:
        entry = self.local.get(response_id, owner)
        if action is ResponseAction.DELETE:
            self.local.delete(response_id, owner)
        elif action is ResponseAction.CANCEL:
            if not entry.response["background"]:
                raise InvalidRequest(
                    "only a response in the background can be cancelled", param="response_id"
                )
            if entry.task is not None:
                entry.task.cancel()
                await asyncio.wait({entry.task}, timeout=_CANCEL_S)
        return entry


class ContinuedChat:
    """The chat that a request goes on with: `messages` and the chat request of them, which are
    complete once `complete` has run."""

    def __init__(
        self,
        body: InputTokensRequest,
        responses: SharedResponses,
        owner: str,
        ignored: list[str] | None,
    ) -> None:
        """Raises InvalidRequest, also when the response before is not stored."""
        self._body, self._responses, self._owner = body, responses, owner
        self._strict = ignored is None
        self._new = new_messages(body, ignored)
        before: Sequence[Mapping[str, Any]] = ()
        if not responses.elsewhere(body.previous_response_id):
            before = responses.local.messages_up_to(body.previous_response_id, owner)
        self.messages = [*before, *self._new]
        self.request = to_chat(body, self.messages, ignored)

    async def complete(self) -> None:
        """Fetch what another router has stored. Raises InvalidRequest, or Unavailable."""
        response_id = self._body.previous_response_id
        if response_id is None or not self._responses.elsewhere(response_id):
            return
        try:
            entry = await self._responses.find(response_id, self._owner)
        except NotFound as error:
            raise InvalidRequest(error.message, param="previous_response_id") from None
        self.messages = [*ended_messages(entry), *self._new]
        ignored = None if self._strict else list[str]()  # they are known already
        self.request = await asyncio.to_thread(to_chat, self._body, self.messages, ignored)


def _tag(router_id: str) -> str:
    return router_id.removeprefix("router-")
