"""Print a label of a node: python node-zone.py ACCOUNT NODE LABEL. An empty line: it has no such label.

ACCOUNT is a directory with the files `token` and `ca.crt` of a ServiceAccount that may read nodes.
"""

import json
import ssl
import sys
import urllib.request
from os import environ
from pathlib import Path


def main(account: str, node: str, label: str) -> None:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}/api/v1/nodes/{node}"
    token = (Path(account) / "token").read_text().strip()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(Path(account) / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
        print(json.load(answer)["metadata"].get("labels", {}).get(label, ""))


if __name__ == "__main__":
    main(*sys.argv[1:])
