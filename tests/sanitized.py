"""The module with AddressSanitizer, in stock Envoy.

What the module allocates and what it touches is checked; what Envoy allocates is not, since Envoy is not
built so. The allocator is that of filters/abi/src/sanitized.rs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.module_rig import Envoy

_FILTERS = Path(__file__).parents[1] / "filters"
_TARGET = "x86_64-unknown-linux-gnu"


def build() -> Path:
    """The module's file. It takes minutes the first time."""
    path = f"{os.environ['PATH']}{os.pathsep}{Path.home() / '.cargo' / 'bin'}"
    environment = {
        **os.environ,
        "PATH": path,
        "RUSTC_BOOTSTRAP": "1",  # stable Rust has the sanitizer, too, behind a flag
        "RUSTFLAGS": "-Zsanitizer=address --cfg tidevoy_sanitized -Cforce-frame-pointers=yes",
    }
    profile = ('profile.release.lto="off"', "profile.release.codegen-units=16")
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "module"]
    command += ["--target", _TARGET, "--target-dir", "target/sanitized"]
    command += [word for each in profile for word in ("--config", each)]
    subprocess.run(command, cwd=_FILTERS, env=environment, check=True)
    return _FILTERS / "target" / "sanitized" / _TARGET / "release" / "libtidevoy.so"


class SanitizedEnvoy(Envoy):
    """An Envoy that can load it. It ends at the first fault, and its log says which."""

    def environment(self) -> Mapping[str, str]:
        """Ours, with the sanitizer's library."""
        command = ["gcc", "-print-file-name=libasan.so"]
        library = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        return {
            **super().environment(),
            "LD_PRELOAD": str(Path(library).resolve()),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
        }
