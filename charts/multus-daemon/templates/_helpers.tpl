{{/* Values of the distribution, as YAML; those of the chart's user win. */}}
{{- define "multus.distribution" -}}
{{- $all := .Files.Get "files/distributions.yaml" | fromYaml -}}
{{- $defaults := dict
  "paths" (dict
    "cniConfigDir" "/etc/cni/net.d"
    "binDir" "/opt/cni/bin"
    "netns" "/run/netns"
    "podResources" "/var/lib/kubelet/pod-resources"
    "devicePlugins" "/var/lib/kubelet/device-plugins")
  "config" dict
  "seLinuxType" "spc_t"
  "securityContextConstraints" false
  "thin" false
  "bootstrap" (dict
    "kubeconfig" "/etc/kubernetes/kubelet.conf"
    "directories" (list "/var/lib/kubelet/pki")) -}}
{{- $found := mergeOverwrite $defaults (index $all .Values.distribution) -}}
{{- range $key, $value := .Values.paths }}{{ if $value }}{{ $_ := set $found.paths $key $value }}{{ end }}{{ end -}}
{{- if not (kindIs "invalid" .Values.daemonSet.seLinuxType) }}
{{- $_ := set $found "seLinuxType" .Values.daemonSet.seLinuxType }}{{ end -}}
{{- with .Values.perNodeCertificates.bootstrapKubeconfig }}{{ $_ := set $found.bootstrap "kubeconfig" . }}{{ end -}}
{{- with .Values.perNodeCertificates.bootstrapDirectories }}{{ $_ := set $found.bootstrap "directories" . }}{{ end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* The image with tag or digest. */}}
{{- define "multus.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Labels of every object; selectors have others, which never change. */}}
{{- define "multus.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* daemon-config.json */}}
{{- define "multus.config" -}}
{{- $distribution := include "multus.distribution" . | fromYaml -}}
{{- $config := dict
  "chrootDir" "/hostroot"
  "cniConfigDir" "/host/etc/cni/net.d"
  "multusAutoconfigDir" "/host/etc/cni/net.d"
  "multusConfigFile" "auto"
  "socketDir" "/host/run/multus/"
  "logLevel" "verbose"
  "logToStderr" true -}}
{{- if ne $distribution.paths.binDir "/opt/cni/bin" }}{{ $_ := set $config "binDir" $distribution.paths.binDir }}{{ end -}}
{{- if ne .Release.Namespace "kube-system" }}{{ $_ := set $config "multusNamespace" .Release.Namespace }}{{ end -}}
{{- $config = mergeOverwrite $config $distribution.config -}}
{{- if .Values.perNodeCertificates.enabled -}}
{{- $_ := set $config "perNodeCertificate" (dict
  "enabled" true
  "bootstrapKubeconfig" $distribution.bootstrap.kubeconfig
  "certDir" "/run/multus-certificates"
  "certDuration" .Values.perNodeCertificates.duration) -}}
{{- end -}}
{{- if .Values.startupTaint.enabled }}{{ $_ := set $config "startupTaint" .Values.startupTaint.key }}{{ end -}}
{{- with .Values.metrics.tls.secretName -}}
{{- $_ := set $config "metricsTLS" (dict
  "certFile" "/etc/multus/metrics-tls/tls.crt"
  "keyFile" "/etc/multus/metrics-tls/tls.key") -}}
{{- end -}}
{{- if .Values.metrics.authorization -}}
{{- if not .Values.metrics.tls.secretName }}
{{- fail "metrics.authorization: set metrics.tls.secretName too, or tokens cross the network in plain text" }}
{{- end }}
{{- $_ := set $config "metricsAuthorization" true -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy .Values.config) | toPrettyJson -}}
{{- end -}}

{{/* Security of a container that handles the node's files; `capabilities` of it, as lines of YAML. */}}
{{- define "multus.security" -}}
{{- $distribution := include "multus.distribution" .root | fromYaml -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
  add:
    {{- .capabilities | nindent 4 }}
seccompProfile:
  type: RuntimeDefault
{{- with $distribution.seLinuxType }}
# Where SELinux is on, the only type that may use the node's files; elsewhere without effect.
seLinuxOptions:
  type: {{ . }}
{{- end }}
{{- end -}}

{{- define "multus.capabilities" -}}
# Links, addresses, routes, sysctls of networks, packet filters.
- NET_ADMIN
# The kernel's reports of changes in other network namespaces: broken attachments are found at once.
- NET_BROADCAST
# iptables of the legacy kind, and plugins that announce or probe an address.
- NET_RAW
# setns(2) into the network namespace of a pod.
- SYS_ADMIN
# Plugins run in chrootDir.
- SYS_CHROOT
# Files and sockets of the node that root does not own, or made without any permission (tuning's).
- DAC_OVERRIDE
# /proc/<pid>/ns/net of other programs; sysctls, which a container has read-only, through the node's init.
- SYS_PTRACE
{{- end -}}

{{/* Security of a container that attaches and detaches pods. */}}
{{- define "multus.daemonSecurity" -}}
{{- if .Values.daemonSet.privileged -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
{{- include "multus.security" (dict "root" . "capabilities" (include "multus.capabilities" .)) }}
# The default profiles of containerd and CRI-O forbid mounts and writing below /proc/sys.
appArmorProfile:
  type: Unconfined
{{- end -}}
{{- end -}}
