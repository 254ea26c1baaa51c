"""The embedded default: pods and networks from a directory of manifests, no cluster needed."""
