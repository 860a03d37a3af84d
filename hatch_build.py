"""Build hook: makes `controlplane/etcd/rpc_pb2.py` from `rpc.proto`, for wheels and editable installs alike.

The file is generated code of the protobuf release that is installed, so it is made where it is used and never
kept in git.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO = "controlplane/etcd/rpc.proto"
GENERATED = "controlplane/etcd/rpc_pb2.py"


def generate(root: Path) -> None:
    """Write the generated module under `root`. RuntimeError when protoc refuses (it has said why)."""
    if protoc.main(["protoc", f"-I{root}", f"--python_out={root}", str(root / PROTO)]) != 0:
        raise RuntimeError(f"protoc could not compile {PROTO}; its message stands above")


class ProtobufHook(BuildHookInterface[Any]):
    """What hatchling runs before it packs anything."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, and ship what git ignores. `version` is hatchling's kind of build, e.g. `editable`."""
        generate(Path(self.root))
        build_data["artifacts"].append(GENERATED)


if __name__ == "__main__":
    generate(Path(__file__).parent)
