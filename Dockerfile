# The image of the daemon, the shim inside, for the architecture of the node: `make image IMAGE=...` (image/build.py), or
# any builder that knows secrets for RUN and the arguments TARGETARCH and BUILDPLATFORM (BuildKit, buildah 1.28 or newer):
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag multus-daemon .
#   buildah bud --build-arg BASE=registry.example/debian-with-python --secret id=pip.conf,src=pip.conf .
#
# Nothing of the target's is executed, so no emulation is needed: every program that runs here is the builder's, the
# shim is cross-compiled, and all that is installed has wheels.
#
# BASE: glibc, Python 3.11 or newer with venv, coreutils. BUILD_BASE: the same with the same Python, for the builder; only
# where BASE has no image of the builder's architecture. The secrets `pip.conf` (which index) and `ca.pem`
# (/run/secrets/ca.pem, for `cert =` in that file) are optional, and are in no layer.
# The digest is that of the list of all architectures. The name beside it is for readers: nothing looks at the tag.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b
ARG BUILD_BASE=${BASE}
ARG VERSION=0.1.0

FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS build
ARG TARGETARCH
WORKDIR /src
COPY . .
# pip is in an environment of its own, so that the daemon's never has one. Everything has the versions and hashes of
# image/requirements.txt and image/build-requirements.txt.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.pem,target=/run/secrets/ca.pem \
    python3 image/install.py /opt/multus "${TARGETARCH:-native}"
# Byte code is never compared with its source: file times are no part of an image, and nobody can write to it. It is for
# PYTHONOPTIMIZE and PYTHONNODEBUGRANGES, as below.
RUN PYTHONNODEBUGRANGES=1 /opt/multus/bin/python -m compileall -q -o 2 --invalidation-mode unchecked-hash /opt/multus/lib \
    && chown -R 0:0 /opt/multus \
    && chmod -R a-w,a+rX /opt/multus

FROM ${BASE} AS base

FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS root
COPY --from=base / /target
COPY image/slim.py image/sbom.py LICENSE /tmp/
# The base without pip, package manager, other programs and documents that a running daemon does not need, and without
# setuid bits.
# The standard library gets its byte code here, as no image has it for PYTHONOPTIMIZE and the daemon can't write it.
RUN python3 /tmp/slim.py /target \
    && stdlib="/target$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && find /target -xdev \( -name 'pip' -o -name 'pip3*' -o -name 'pip-*' -o -name 'setuptools' -o -name 'setuptools-*' \
        -o -name 'wheel' -o -name 'wheel-*' -o -name '_distutils_hack' -o -name 'distutils-precedence.pth' \
        -o -name 'ensurepip' -o -name 'python-wheels' \
        -o -name '__pycache__' -o -name 'idlelib' -o -name 'pydoc_data' -o -name 'tkinter' -o -name 'lib2to3' \
        -o -name 'turtledemo' \) \
        -prune -exec rm -rf {} + \
    && cd /target \
    && rm -rf "${stdlib}/test" var/lib/apt/lists var/cache var/log usr/share/doc usr/share/man usr/share/info \
        usr/share/locale usr/share/lintian root/.cache tmp/* etc/mime.types \
    && mkdir -p var/cache var/log \
    && PYTHONNODEBUGRANGES=1 python3 -m compileall -q -o 2 --invalidation-mode unchecked-hash -s /target "${stdlib}" \
    && find . -xdev -perm /6000 -type f -exec chmod ug-s {} +
COPY --from=build /opt/multus /target/opt/multus
ARG VERSION
# The names that manifests and charts of upstream's image call: a change of the image is all that they need.
RUN chmod a-w /target/opt/multus \
    && mkdir -p /target/usr/src/multus-cni/bin /target/usr/share/sbom \
    && cd /target/usr/src/multus-cni/bin \
    && for name in multus-daemon install_multus cert-approver kubeconfig_generator; do \
        ln -s /opt/multus/bin/multus-daemon "$name"; done \
    && for name in multus-shim passthru; do ln -s /opt/multus/bin/multus-shim "$name"; done \
    && ln -s /opt/multus/bin/multus-daemon /target/cert-approver \
    && cp /tmp/LICENSE /target/usr/src/multus-cni/LICENSE \
    && python3 /tmp/sbom.py /target "${VERSION}" >/target/usr/share/sbom/multus-daemon.cdx.json

# One layer: what was removed is not in it, instead of hidden by it.
FROM scratch
COPY --from=root /target /
ARG VERSION
ARG REVISION=
ARG SOURCE=
ARG CREATED=
LABEL org.opencontainers.image.title="multus-daemon" \
    org.opencontainers.image.description="Drop-in replacement for the Multus CNI thick plugin: a native shim and a Python daemon" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.created="${CREATED}"
# Without docstrings and the columns of tracebacks' lines the daemon has 2 MB less of 31.
ENV PATH=/opt/multus/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONNODEBUGRANGES=1 \
    PYTHONOPTIMIZE=2 \
    PYTHONSAFEPATH=1
# Root of the node's user namespace: it enters the network namespaces of pods, and serves nobody but root. What needs
# less has less in the manifests (cert-approver: `runAsNonRoot`).
USER 0:0
WORKDIR /
ENTRYPOINT ["/opt/multus/bin/multus-daemon"]
