"""The fields of KubeRay's RayService, as JSON Schema.

Written from the types that its custom resource definition is generated from
(https://github.com/ray-project/kuberay, ray-operator/apis/ray/v1, `raycluster_types.go` and
`rayservice_types.go`), and from Ray's pages on label-based scheduling, token authentication and
autoscaler v2 for what those added. Pod templates are Kubernetes' own and left to its schema.
"""

from __future__ import annotations

from typing import Any

OPEN = {"type": "object"}
FLAG = {"type": "boolean"}
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


CREDENTIAL = closed(value=TEXT, valueFrom=OPEN)
POD_TEMPLATE = closed(("spec",), metadata=OPEN, spec=OPEN)
AUTOSCALER = closed(
    resources=OPEN,
    image=TEXT,
    imagePullPolicy=TEXT,
    securityContext=OPEN,
    idleTimeoutSeconds=COUNT,
    upscalingMode=choice("Default", "Aggressive", "Conservative"),
    version=choice("v1", "v2"),
    env={"type": "array"},
    envFrom={"type": "array"},
    volumeMounts={"type": "array"},
)
HEAD = closed(
    ("rayStartParams", "template"),
    template=POD_TEMPLATE,
    headService=OPEN,
    enableIngress=FLAG,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    serviceType=choice("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
)
WORKERS = closed(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    suspend=FLAG,
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
    scaleStrategy=OPEN,
    numOfHosts=COUNT,
)
CLUSTER = closed(
    ("headGroupSpec",),
    suspend=FLAG,
    managedBy=choice("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
    authOptions=closed(mode=choice("disabled", "token")),
    autoscalerOptions=AUTOSCALER,
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=closed(
        ("redisAddress",),
        redisUsername=CREDENTIAL,
        redisPassword=CREDENTIAL,
        externalStorageNamespace=TEXT,
        redisAddress=TEXT,
    ),
    headGroupSpec=HEAD,
    rayVersion=TEXT,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_SERVICE = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=choice("ray.io/v1"),
    kind=choice("RayService"),
    metadata=OPEN,
    spec=closed(
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
        serveService=OPEN,
        upgradeStrategy=closed(type=choice("NewCluster", "None"), clusterUpgradeOptions=OPEN),
        excludeHeadPodFromServeSvc=FLAG,
        rayClusterDeletionDelaySeconds=COUNT,
    ),
)
