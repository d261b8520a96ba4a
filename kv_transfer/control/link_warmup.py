"""Links are built when two workers learn of each other: an NCCL pair takes half a second, for which
no hand-off should have to wait."""

from __future__ import annotations

from msgspec.structs import replace

from kv_transfer.backends.choice import choose_backend
from kv_transfer.config import ONE_SIDED
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.rank_channel import first_error, run_orders
from kv_transfer.control.sender_channel import SenderChannel
from kv_transfer.data.rank_commands import (
    OpenCommand,
    Parts,
    RankCommand,
    received_parts,
    sent_parts,
)
from kv_transfer.plan.reshard import check_layout
from observability.logging import get_logger
from protocol.errors import BatonError
from protocol.messages import Meeting
from rpc import methods

log = get_logger(__name__)


async def meet(party: EndpointContext, channel: SenderChannel) -> None:
    """Build the links to a decode worker. Never raises: one that does not come about is built by
    the first piece that needs it."""
    link = channel.link
    try:
        await _meet(party, channel, link)
    except BatonError as error:
        channel.renew(link)
        who = channel.decode.worker_id
        log.info("no links ahead of hand-offs", extra={"decode": who, "reason": error.message})


async def _meet(party: EndpointContext, channel: SenderChannel, link: int) -> None:
    address, clients = channel.decode.address, party.clients
    limit = party.config.rpc_timeout_s
    meeting = Meeting(prefill=party.ref, prefill_layout=party.layout)
    welcome = await clients.get(address).call(methods.MEET, meeting, timeout_s=limit)
    check_layout(party.layout, welcome.layout)
    backend = choose_backend(
        party.config.backend,
        welcome.links,
        num_ranks=welcome.layout.tp_size,
        refused=channel.refused,
    )
    if backend not in ONE_SIDED:  # decode's ranks have to wait for ours
        meeting = replace(meeting, link=link, backend=backend)
        await clients.get(address).call(methods.MEET, meeting, timeout_s=limit)
    parts, ends = (
        sent_parts(party.layout, welcome, backend),
        (party.ref.epoch, channel.decode.epoch),
    )
    orders = _orders(parts, *ends, link, backend, sending=True)
    failure = first_error(await run_orders(party.ranks, orders))
    if failure is not None:
        raise failure


def accept_orders(party: EndpointContext, meeting: Meeting) -> dict[int, RankCommand]:
    """What each destination rank has to do for the links of a meeting."""
    parts = received_parts(meeting.prefill_layout.rank_heads, party.layout.rank_heads)
    ends = (meeting.prefill.epoch, party.ref.epoch)
    return _orders(parts, *ends, meeting.link, meeting.backend, sending=False)


def _orders(
    parts: Parts,
    sender_epoch: int,
    receiver_epoch: int,
    link: int,
    backend: str,
    *,
    sending: bool,
) -> dict[int, RankCommand]:
    return {
        rank: RankCommand(
            open=OpenCommand(
                rank=rank,
                sender_epoch=sender_epoch,
                receiver_epoch=receiver_epoch,
                link=link,
                backend=backend,
                peers=tuple((part.peer_rank, part.endpoint) for part in own),
                sending=sending,
            )
        )
        for rank, own in parts.items()
    }
