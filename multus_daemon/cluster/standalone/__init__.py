"""The cluster store without Kubernetes: pods and networks from a directory of manifests (`--standalone`)."""
