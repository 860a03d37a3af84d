"""What gRPC statuses of etcd mean: whether another member may be asked, and whether this one has acted."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from controlplane.etcd.stream import Rejected, Unanswered, error_from_status

URL = "http://pd-0:2379"


@pytest.mark.parametrize(
    ("code", "details", "sentence", "untouched"),
    [
        (StatusCode.UNAVAILABLE, "Connection refused", "cannot be reached (Connection refused)", False),
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
def test_another_member_may_do_better(code: StatusCode, details: str, sentence: str, untouched: bool) -> None:
    error = error_from_status(URL, code, details)
    assert isinstance(error, Unanswered)
    assert (str(error).startswith(sentence), error.not_applied) == (True, untouched)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (StatusCode.NOT_FOUND, "etcdserver: requested lease not found"),
        (StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted"),
        (StatusCode.PERMISSION_DENIED, "etcdserver: permission denied"),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty"),
    ],
)
def test_every_member_would_say_so(code: StatusCode, details: str) -> None:
    error = error_from_status(URL, code, details)
    assert isinstance(error, Rejected)
    assert str(error) == f"PD at {URL} refused: {details}"
