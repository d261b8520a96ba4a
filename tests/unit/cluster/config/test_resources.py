"""Replicas that cannot all be placed are refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.config.checks import Demand, Node, check_resources, demands_of
from cluster.config.schema import (
    ClusterConfig,
    ModelSection,
    PlacementSection,
    PoolSection,
    RaySection,
)
from cluster.membership.table import Pool
from cluster.serve import deployments
from cluster.serve.control import PoolStatus
from engine.config import EngineConfig
from protocol.errors import InvalidRequest


def group(pool: str, replicas: int, ranks: int, **bundle: float) -> Demand:
    return Demand(pool=pool, replicas=replicas, bundles=(bundle,) * ranks)


def nodes(*offers: dict[str, float]) -> list[Node]:
    return [Node(resources=offer) for offer in offers]


def test_fits() -> None:
    check_resources([group("decode", 2, 4, GPU=1)], nodes({"GPU": 4}, {"GPU": 4}))


def test_a_group_must_lie_on_one_node() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_resources([group("decode", 1, 4, GPU=1)], nodes({"GPU": 2}, {"GPU": 2}))
    assert caught.value.param == "decode.replicas"
    assert "fragmented" in caught.value.message
    assert "demand: decode 1 x GPU 4" in caught.value.message
    assert "node 0: GPU 2; node 1: GPU 2" in caught.value.message


def test_not_enough_in_total() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_resources([group("prefill", 3, 1, GPU=1)], nodes({"GPU": 2}))
    assert "replica 3 of 3" in caught.value.message
    assert "fragmented" not in caught.value.message


def test_large_groups_are_placed_first() -> None:
    """Four single-GPU replicas must not spread over both nodes and keep a group of four out."""
    demands = [group("prefill", 4, 1, GPU=1), group("decode", 1, 4, GPU=1)]
    check_resources(demands, nodes({"GPU": 4}, {"GPU": 4}))


def test_small_groups_fill_the_fullest_node() -> None:
    demands = [group("a", 1, 3, GPU=1), group("b", 1, 1, GPU=1), group("c", 1, 2, GPU=1)]
    check_resources(demands, nodes({"GPU": 2}, {"GPU": 4}))


def test_other_resources_count_too() -> None:
    with pytest.raises(InvalidRequest, match="prefill_node"):
        check_resources(
            [group("prefill", 1, 1, CPU=1, prefill_node=1)], nodes({"CPU": 8, "decode_node": 1})
        )


def test_labels_keep_pools_to_their_nodes() -> None:
    wanted = Demand(pool="decode", replicas=1, bundles=({"GPU": 1},), labels={"pool": "decode"})
    prefill_node = Node(resources={"GPU": 8}, labels={"pool": "prefill"})
    check_resources([wanted], [prefill_node, Node(resources={"GPU": 1}, labels={"pool": "decode"})])
    with pytest.raises(InvalidRequest) as caught:
        check_resources([wanted], [prefill_node, Node(resources={"GPU": 8})])
    assert "no node labelled pool=decode" in caught.value.message
    assert "node 0: GPU 8 pool=prefill; node 1: GPU 8 pool=none" in caught.value.message
    assert "fragmented" not in caught.value.message


def test_replicas_that_could_go_anywhere_leave_labelled_nodes_to_those_that_must_go_there() -> None:
    """Whichever is larger, and whichever node comes first; a custom resource says the same."""
    label = {"pool": "decode"}
    labelled = Node(resources={"GPU": 4, "decode_node": 1}, labels=label)
    anywhere = group("prefill", 1, 4, GPU=1)
    by_label = Demand(pool="decode", replicas=2, bundles=({"GPU": 1},), labels=label)
    by_resource = group("decode", 2, 1, GPU=1, decode_node=0.5)
    plain = Node(resources={"GPU": 4})
    for few in (by_label, by_resource):
        check_resources([anywhere, few], [labelled, plain])
        check_resources([anywhere, few], [plain, labelled])
        with pytest.raises(InvalidRequest, match="replica 1 of"):
            check_resources([anywhere, few], [labelled])


def test_a_node_can_be_filled_to_its_end_with_parts_of_cores() -> None:
    """As floats, 1 - 0.8 - 0.1 is less than 0.1."""
    parts = [group("router", 1, 1, CPU=0.8), group("prefill", 1, 1, CPU=0.1)]
    check_resources([*parts, group("decode", 1, 1, CPU=0.1)], nodes({"CPU": 1.0}))
    with pytest.raises(InvalidRequest, match=r"^prefill\.replicas"):
        check_resources([*parts, group("decode", 1, 1, CPU=0.1001)], nodes({"CPU": 1.0}))


def test_any_number_of_replicas_is_refused_at_the_first_without_room() -> None:
    with pytest.raises(InvalidRequest, match=r"^prefill\.replicas: replica 3 of 10{30} finds"):
        check_resources([group("prefill", 10**30, 1, GPU=1)], nodes({"GPU": 2}))


def test_nothing_to_place() -> None:
    check_resources([group("prefill", 0, 1, GPU=1)], [])


def statuses(**sizes: int) -> dict[Pool, PoolStatus]:
    return {
        Pool(name): PoolStatus(
            pool=Pool(name), target=size, replicas={}, healthy=True, failed=False, message=""
        )
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("autoscaling", [False, True])
def test_pools_do_not_outgrow_the_cluster(
    autoscaling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five CPUs for a router, two prefill and two decode workers. One pool may take what another
    gives; nodes that come when they are asked for are room, too."""
    config = ClusterConfig(model=ModelSection(name="m"), ray=RaySection(autoscaling=autoscaling))
    asked: list[tuple[Pool, int]] = []
    monkeypatch.setattr(
        deployments, "pool_statuses", lambda: statuses(router=1, prefill=2, decode=2)
    )
    monkeypatch.setattr(deployments, "nodes", lambda: nodes({"CPU": 5.0}))
    monkeypatch.setattr(deployments, "set_replicas", lambda *size: not asked.append(size))
    deployments.scale(config, {Pool.DECODE: 3, Pool.PREFILL: 1})
    assert asked == [(Pool.DECODE, 3), (Pool.PREFILL, 1)]
    asked.clear()
    larger = {Pool.PREFILL: 2, Pool.DECODE: 3}
    if autoscaling:
        deployments.scale(config, larger)
        assert asked == list(larger.items())
        return
    with pytest.raises(InvalidRequest) as caught:
        deployments.scale(config, larger)
    assert asked == []
    assert caught.value.param == "decode.replicas"
    assert "demand: router 1 x CPU 1; prefill 2 x CPU 1; decode 3 x CPU 1" in caught.value.message


def test_pools_of_a_cluster_that_has_lost_a_machine_can_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for four of the six replicas is left. Who makes a pool smaller need not make all fit."""
    config = ClusterConfig(model=ModelSection(name="m"))
    asked: list[tuple[Pool, int]] = []
    monkeypatch.setattr(
        deployments, "pool_statuses", lambda: statuses(router=1, prefill=2, decode=3)
    )
    monkeypatch.setattr(deployments, "nodes", lambda: nodes({"CPU": 4.0}))
    monkeypatch.setattr(deployments, "set_replicas", lambda *size: not asked.append(size))
    deployments.scale(config, {Pool.DECODE: 2})
    deployments.scale(config, {Pool.PREFILL: 0, Pool.DECODE: 3})
    assert asked == [(Pool.DECODE, 2), (Pool.PREFILL, 0), (Pool.DECODE, 3)]
    with pytest.raises(InvalidRequest, match=r"^decode\.replicas"):
        deployments.scale(config, {Pool.PREFILL: 1, Pool.DECODE: 4})
    assert len(asked) == 3


def test_a_pool_without_a_device_of_its_own_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of decode alone says nothing about prefill's device."""
    on_gpu = PoolSection(
        placement=PlacementSection(gpus=1), engine=EngineConfig(model_path="m", device="cuda")
    )
    config = ClusterConfig(
        model=ModelSection(name="m"), prefill=PoolSection(replicas=0), decode=on_gpu
    )
    asked: list[tuple[Pool, int]] = []
    monkeypatch.setattr(deployments, "pool_statuses", lambda: statuses(router=1, decode=1))
    monkeypatch.setattr(deployments, "nodes", lambda: nodes({"CPU": 9.0, "GPU": 9.0}))
    monkeypatch.setattr(deployments, "set_replicas", lambda *size: not asked.append(size))
    deployments.scale(config, {Pool.DECODE: 2, Pool.PREFILL: 0})
    with pytest.raises(InvalidRequest, match=r"^prefill\.engine\.device: is 'cpu', but decode"):
        deployments.scale(config, {Pool.DECODE: 3, Pool.PREFILL: 1})
    assert asked == [(Pool.DECODE, 2), (Pool.PREFILL, 0)]


def test_demands_of_a_config() -> None:
    config = ClusterConfig(
        model=ModelSection(name="m"),
        prefill=PoolSection(
            replicas=2,
            placement=PlacementSection(cpus=2, gpus=1, resources={"p": 0.5}, memory_bytes=1 << 30),
            engine=EngineConfig(model_path="m", device="cuda", tp_size=2),
        ),
    )
    router, prefill, decode = demands_of(config)
    assert (router.pool, router.replicas, router.bundles) == ("router", 1, ({"CPU": 1.0},))
    assert prefill.replicas == 2
    bundle = {"CPU": 2.0, "GPU": 1.0, "p": 0.5, "memory": float(1 << 30)}
    assert prefill.bundles == (bundle, bundle)
    assert prefill.total() == {"CPU": 4.0, "GPU": 2.0, "p": 1.0, "memory": float(2 << 30)}
    assert decode.bundles == ({"CPU": 1.0},)
