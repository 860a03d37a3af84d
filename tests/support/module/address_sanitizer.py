"""The module built with AddressSanitizer, in stock Envoy.

The allocator of filters/envoy-abi/src/asan_allocator.rs checks the module's memory. Envoy's memory is not
checked, because Envoy is built without the sanitizer.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.module.envoy import ModuleEnvoy

_FILTERS = Path(__file__).parents[3] / "filters"
_TARGET = "x86_64-unknown-linux-gnu"
_INTERCEPTOR_PREFIX = "__interceptor_"


def build_sanitized_module() -> Path:
    """Build the module and return its file. Takes minutes the first time."""
    path = f"{os.environ['PATH']}{os.pathsep}{Path.home() / '.cargo' / 'bin'}"
    environment = {
        **os.environ,
        "PATH": path,
        "RUSTC_BOOTSTRAP": "1",  # Permits the unstable flag -Zsanitizer with stable Rust.
        "RUSTFLAGS": "-Zsanitizer=address --cfg tidevoy_sanitized -Cforce-frame-pointers=yes",
    }
    profile = ('profile.release.lto="off"', "profile.release.codegen-units=16")
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "tidevoy-module"]
    command += ["--target", _TARGET, "--target-dir", "target/sanitized"]
    command += [word for option in profile for word in ("--config", option)]
    subprocess.run(command, cwd=_FILTERS, env=environment, check=True)
    return _FILTERS / "target" / "sanitized" / _TARGET / "release" / "libtidevoy.so"


# The sanitizer's versions of these functions use its allocator, but Envoy frees the results with another one.
_ALLOCATING_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

char *strndup(const char *text, size_t most) {
    size_t length = strnlen(text, most);
    char *copy = malloc(length + 1);
    if (copy) {
        memcpy(copy, text, length);
        copy[length] = 0;
    }
    return copy;
}

char *strdup(const char *text) { return strndup(text, strlen(text)); }

char *__strdup(const char *text) { return strdup(text); }

char *realpath(const char *path, char *out) {
    char *(*next)(const char *, char *) = dlsym(RTLD_NEXT, "realpath");
    return next(path, out ? out : malloc(PATH_MAX));
}
"""


class SanitizedEnvoy(ModuleEnvoy):
    """An Envoy that can load the sanitized module. It exits at the first error, which its log describes."""

    def environment(self) -> Mapping[str, str]:
        """Return our environment with the sanitizer and two libraries that Envoy's allocator requires."""
        sanitizer = Path(_output("gcc", "-print-file-name=libasan.so")).resolve()
        allocating = _compile_library(self.directory / "allocating.so", _ALLOCATING_SOURCE)
        missing = _compile_library(self.directory / "lacking.so", _missing_functions_source(sanitizer))
        options = "detect_leaks=0:halt_on_error=1:exitcode=99:verify_asan_link_order=0"
        preloaded = f"{allocating}:{sanitizer}:{missing}"
        return {**super().environment(), "LD_PRELOAD": preloaded, "ASAN_OPTIONS": options}


def _missing_functions_source(sanitizer: Path) -> str:
    """Return C source of the functions that the sanitizer intercepts and this system does not have.

    If the sanitizer does not find such a function, it allocates an error message. Envoy's allocator then
    calls functions of the sanitizer that are not initialized yet.
    """
    words = _output("nm", "--dynamic", "--defined-only", str(sanitizer)).split()
    names = [word.removeprefix(_INTERCEPTOR_PREFIX) for word in words if word.startswith(_INTERCEPTOR_PREFIX)]
    system = [ctypes.CDLL(name) for name in ("libc.so.6", "libm.so.6", "libgcc_s.so.1")]
    missing = [name for name in names if not any(hasattr(library, name) for library in system)]
    return "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in missing)


def _compile_library(file: Path, source: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", "-x", "c", "-o", str(file), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return file


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
