# The image of the daemon, the shim inside. Any builder that knows secrets for RUN builds it (BuildKit, buildah 1.24 or
# newer), for the architecture that it runs the stages on:
#
#   docker build --tag multus-daemon .
#   buildah bud --build-arg BASE=registry.example/debian-with-python --secret id=pip.conf,src=pip.conf .
#
# BASE: glibc, Python 3.11 or newer with venv, coreutils. The secrets `pip.conf` (which index) and `ca.pem`
# (/run/secrets/ca.pem, for `cert =` in that file) are optional, and are in no layer.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY . .
# pip is in an environment of its own, so that the daemon's never has one. The build hook compiles the shim for this
# machine; everything has the versions of constraints.txt.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.pem,target=/run/secrets/ca.pem \
    python3 -m venv /tmp/pip \
    && python3 -m venv --without-pip /opt/multus \
    && PIP_CONSTRAINT=/src/constraints.txt /tmp/pip/bin/pip --python /opt/multus/bin/python \
        install --no-cache-dir --no-compile '.[devices,certificates]' \
    && find /opt/multus/lib -type d \( -name tests -o -name test \) -prune -exec rm -rf {} + \
    && find /opt/multus/bin -type f -not -name 'multus*' -delete
# Byte code is never compared with its source: file times are no part of an image, and nobody can write to it.
RUN /opt/multus/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/multus/lib \
    && chown -R 0:0 /opt/multus \
    && chmod -R a-w,a+rX /opt/multus

FROM ${BASE} AS root
# The base without what a running daemon has no use for: pip, package lists, documents, programs with the setuid bit.
# The standard library gets its byte code here, as the official image has none and the daemon can't write it.
RUN stdlib="$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && find / -xdev \( -name 'pip' -o -name 'pip3*' -o -name 'pip-*' -o -name 'setuptools' -o -name 'setuptools-*' \
        -o -name 'wheel' -o -name 'wheel-*' -o -name '_distutils_hack' -o -name 'distutils-precedence.pth' \
        -o -name 'ensurepip' -o -name 'python-wheels' \
        -o -name 'idlelib' -o -name 'tkinter' -o -name 'lib2to3' -o -name 'turtledemo' \) \
        -not -path '/proc/*' -not -path '/sys/*' -prune -exec rm -rf {} + \
    && rm -rf "${stdlib}/test" /var/lib/apt/lists /var/cache /var/log /usr/share/doc /usr/share/man /usr/share/info \
        /usr/share/locale /usr/share/lintian /root/.cache /tmp/* \
    && mkdir -p /var/cache /var/log \
    && python3 -m compileall -q --invalidation-mode unchecked-hash "${stdlib}" \
    && find / -xdev -perm /6000 -type f -not -path '/proc/*' -exec chmod ug-s {} +
COPY --from=build /opt/multus /opt/multus
# The names that manifests and charts of upstream's image call: a change of the image is all that they need.
RUN chmod a-w /opt/multus \
    && mkdir -p /usr/src/multus-cni/bin \
    && for name in multus-daemon install_multus cert-approver kubeconfig_generator; do \
        ln -s /opt/multus/bin/multus-daemon "/usr/src/multus-cni/bin/$name"; done \
    && for name in multus-shim passthru; do \
        ln -s /opt/multus/bin/multus-shim "/usr/src/multus-cni/bin/$name"; done \
    && ln -s /opt/multus/bin/multus-daemon /cert-approver

# One layer: what was removed is not in it, instead of hidden by it.
FROM scratch
COPY --from=root / /
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="multus-daemon" \
    org.opencontainers.image.description="Drop-in replacement for the Multus CNI thick plugin: a native shim and a Python daemon" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/multus/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
# Root of the node's user namespace: it enters the network namespaces of pods, and serves nobody but root.
USER 0:0
WORKDIR /
ENTRYPOINT ["/opt/multus/bin/multus-daemon"]
