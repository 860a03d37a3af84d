"""Validate Kubernetes objects against the schemas of the API, without a server."""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.support.kubernetes.rendered_chart import KUBERNETES_VERSION, Object

_DIRECTORY = "kubernetes-json-schema/v{}-local-strict"
# Objects of these groups belong to other operators, whose schemas the package does not have.
FOREIGN_GROUPS = frozenset({"cert-manager.io", "monitoring.coreos.com"})


def problems(each: Object) -> list[str]:
    """Return what is wrong with an object: unknown fields, wrong types, missing fields."""
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in _validator(each["kind"], each["apiVersion"]).iter_errors(each)
    ]


def is_foreign(each: Object) -> bool:
    """Return whether another operator defines the kind of this object."""
    return each["apiVersion"].partition("/")[0] in FOREIGN_GROUPS


@functools.cache
def _validator(kind: str, api_version: str) -> Any:
    # rbac.authorization.k8s.io/v1 is in clusterrole-rbac-v1.json.
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _read(f"{kind.lower()}-{name}.json")
    registry = _definitions() @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions() -> Any:
    return Resource.from_contents(_read("_definitions.json"))


def _read(name: str) -> Any:
    directory = files("kubernetes_validate").joinpath(_DIRECTORY.format(KUBERNETES_VERSION))
    return json.loads(directory.joinpath(name).read_text(encoding="utf-8"))
