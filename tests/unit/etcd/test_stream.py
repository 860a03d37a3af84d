"""gRPC statuses of etcd: whether another member may be tried, and whether a change was not applied."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from controlplane.etcd.stream import Rejected, Unanswered, error_from_status

URL = "http://pd-0:2379"


@pytest.mark.parametrize(
    ("code", "details", "message", "not_applied"),
    [
        (StatusCode.UNAVAILABLE, "Connection refused", "is unreachable (Connection refused)", False),
        (
            StatusCode.INTERNAL,
            "Internal error from Core",
            "is unreachable (the connection was lost)",
            False,
        ),
        (StatusCode.UNAVAILABLE, "etcdserver: no leader", "answered etcdserver: no leader", True),
        (
            StatusCode.UNAVAILABLE,
            "etcdserver: request timed out",
            "answered etcdserver: request timed",
            False,
        ),
        (StatusCode.UNAVAILABLE, "etcdserver: leader changed", "answered etcdserver: leader changed", False),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "did not answer in time", False),
        (StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", "answered etcdserver: too", True),
        (StatusCode.INTERNAL, "", "answered INTERNAL", False),
        (StatusCode.UNIMPLEMENTED, "", "answered UNIMPLEMENTED", False),
    ],
)
def test_temporary_status_is_unanswered(
    code: StatusCode, details: str, message: str, not_applied: bool
) -> None:
    error = error_from_status(URL, code, details)
    assert isinstance(error, Unanswered)
    assert (str(error).startswith(message), error.not_applied) == (True, not_applied)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (StatusCode.NOT_FOUND, "etcdserver: requested lease not found"),
        (StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted"),
        (StatusCode.PERMISSION_DENIED, "etcdserver: permission denied"),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty"),
    ],
)
def test_final_status_is_rejected(code: StatusCode, details: str) -> None:
    error = error_from_status(URL, code, details)
    assert isinstance(error, Rejected)
    assert str(error) == f"PD at {URL} rejected the call: {details}"
