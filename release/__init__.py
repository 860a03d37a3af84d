"""Builds what a release of Tidevoy consists of: `python -m release`, or `make dist`.

    dist/tidevoy-VERSION-py3-none-manylinux_*.whl   the wheel, with the module and the supervisor of Envoys
    dist/tidevoy_VERSION_ARCH.deb                   control plane and command line, with their Python packages
    dist/tidevoy-envoy_VERSION_ARCH.deb             Envoy, the module and the supervisor
    dist/tidevoy-VERSION.tgz                        the Helm chart
    dist/tidevoy-VERSION-images.tar.gz              both container images, for `docker load`
    dist/tidevoy-VERSION.cdx.json                   the bill of materials (CycloneDX)
    dist/RELEASE_NOTES.md                           the entry of CHANGELOG.md
    dist/SHA256SUMS                                 the checksums of all files

docs/install/verify.md describes how users check them, and docs/internals/releases.md how they are signed.
"""
