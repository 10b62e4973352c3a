"""A short schema, written here, of the fields of a RayJob that containers/kubernetes/rayjob.yaml uses.

KubeRay's own definition is 25,000 lines, most of it Kubernetes' pod. Every object here is closed, so a field
that is misspelt, or new to this file, is refused. `NEMORL_KUBERAY_CRD=ray.io_rayjobs.yaml` lets tests look
at KubeRay's own too.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
YES_OR_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": "^[0-9]+(m|[KMGTP]i?)?$"}
LABELS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,63}$"},
}


def closed(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def some(item: Schema) -> Schema:
    """A list with at least one of these."""
    return {"type": "array", "items": item, "minItems": 1}


MOUNT = closed({"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}}, readOnly=YES_OR_NO)
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY, "required": ["cpu", "memory"]}
CONTAINER = closed(
    {
        "name": NAME,
        "image": TEXT,
        "securityContext": closed(
            {
                "allowPrivilegeEscalation": {"const": False},
                "capabilities": closed({"drop": {"const": ["ALL"]}}),
            }
        ),
        "resources": closed({"requests": AMOUNTS, "limits": AMOUNTS}),
    },
    args=some(TEXT),
    volumeMounts=some(MOUNT),
)
VOLUME = closed(
    {"name": NAME},
    persistentVolumeClaim=closed({"claimName": NAME}),
    configMap=closed({"name": NAME}),
    emptyDir=closed({"medium": {"const": "Memory"}, "sizeLimit": QUANTITY}),
) | {"minProperties": 2}
POD = closed(
    {
        "automountServiceAccountToken": {"const": False},
        "securityContext": closed(
            {
                "runAsNonRoot": {"const": True},
                "runAsUser": {"type": "integer", "minimum": 1},
                "runAsGroup": {"type": "integer", "minimum": 1},
                "fsGroup": {"type": "integer", "minimum": 1},
                "fsGroupChangePolicy": {"enum": ["OnRootMismatch", "Always"]},
                "seccompProfile": closed({"type": {"const": "RuntimeDefault"}}),
            }
        ),
        "containers": some(CONTAINER),
    },
    initContainers=some(CONTAINER),
    volumes=some(VOLUME),
    restartPolicy={"const": "Never"},
    tolerations=some(
        closed(
            {"key": TEXT},
            operator={"enum": ["Exists", "Equal"]},
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        )
    ),
)
TEMPLATE = closed({"spec": POD})
START: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
GROUP = closed(
    {"groupName": NAME, "rayStartParams": START, "template": TEMPLATE},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas={"type": "integer", "minimum": 1},
    labels=LABELS,
)
CLUSTER = closed(
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "headGroupSpec": closed({"rayStartParams": START, "template": TEMPLATE}, labels=LABELS),
        "workerGroupSpecs": some(GROUP),
        "authOptions": closed({"mode": {"enum": ["token", "disabled"]}}),
    }
)
RAY_JOB = closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": closed({"name": {**NAME, "maxLength": 47}}),  # names of pods are made of it
        "spec": closed(
            {"entrypoint": TEXT, "rayClusterSpec": CLUSTER},
            backoffLimit=COUNT,
            preRunningDeadlineSeconds={"type": "integer", "minimum": 1},
            shutdownAfterJobFinishes=YES_OR_NO,
            ttlSecondsAfterFinished=COUNT,
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            submitterPodTemplate=TEMPLATE,
        ),
    }
)
