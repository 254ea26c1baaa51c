"""The embedded default: pods and networks from a directory of manifests, without a cluster."""
