"""Pods, networks and devices as declared for this node, and the destinations of status and Events."""
